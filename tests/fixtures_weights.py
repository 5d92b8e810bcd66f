"""Small checkpoints and vocabularies for the tests of weights, text and model."""

import functools
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers

from specjax.weights import open_checkpoint

PROMPTS = [
    json.loads(line)["turns"][0]
    for line in (Path(__file__).parents[1] / "experiments/prompts/builtin.jsonl").read_text().splitlines()
]
STRINGS = [
    "", " ", "Hello", "  two  spaces ", "\n\n\ttab\r\n", "don't I'LL we'Ve", "123456 7 89\n\n12", "a1b2", "½ ¹²³ ٣٤",
    "日本語のテスト。", "😀👩‍👩‍👧 ok", "naïve café Å e\u0301", "x = 1;\n    y=[2]\n", "\u00a0nbsp",
    "<|im_start|>user\nhi<|im_end|>",
]  # fmt: skip


@pytest.fixture(scope="session")
def smollm2():
    """The default model; its first use may fetch it."""
    try:
        return open_checkpoint("smollm2-135m")
    except ValueError as reason:
        pytest.skip(str(reason))


@functools.cache
def byte_level_vocabulary(size=600):
    """Tokens and merges learned across word boundaries, so that ids show where a pre-tokenizer cuts."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [text[i : i + 40] for text in PROMPTS + STRINGS * 3 for i in range(0, len(text), 40)],
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


@functools.cache
def sentencepiece_vocabulary(size=600):
    """Tokens with scores, byte tokens and control tokens, as llama.cpp stores a sentencepiece model."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(PROMPTS[:20], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    vocab = json.loads(backend.to_str())["model"]["vocab"]
    learned = sorted(vocab, key=vocab.get)
    control, as_bytes = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    long, single = [t for t in learned if len(t) > 1], [t for t in learned if len(t) == 1]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(long) + len(single))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(long) + len(single))
    return control + as_bytes + long + single, scores, types


def write_gguf(path, config, tensors, *, architecture="llama", metadata=(), extra=()):
    """Write tensors of (float32 array, quantization name) under llama.cpp's names."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for name, value in metadata:
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, (values, kind) in [*tensors.items(), *extra]:
        kind = gguf.GGMLQuantizationType[kind]
        raw = values if values.dtype == np.uint8 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_level_metadata(pre, **more):
    """Tokenizer metadata of a GGUF file of kind `gpt2` with three special tokens and one user-defined."""
    tokens, merges = byte_level_vocabulary()
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    types = [1] * len(tokens) + [3, 3, 3, 4]
    return list(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens + added,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": len(tokens),
            "tokenizer.ggml.eos_token_id": len(tokens) + 2,
            **{f"tokenizer.{key}": value for key, value in more.items()},
        }.items()
    )
