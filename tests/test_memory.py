"""The accountant, against worked examples, against arrays that exist, and against itself at other sizes."""

import argparse
import itertools
import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from specjax import LanguageModel, decode, memory, mesh
from specjax import cache as kv
from specjax.cli import main
from specjax.cli import memory as command
from specjax.drafter import Drafter
from specjax.engine import Engine
from specjax.memory import aot, hardware
from specjax.memory.account import GROUPS
from specjax.memory.buffers import PHASES
from specjax.memory.compiler import Compiled
from specjax.memory.strategy import Strategy
from specjax.mesh import nbytes
from specjax.model import PRESETS, Llama
from specjax.plugins import load_drafter
from specjax.testing import tiny_config
from specjax.types import Draft

BACKEND = "tpu"  # a CPU's float32 copies are not of interest here


def subject(spec="none", settings=None, dtype=jnp.float32, drafter=None, **changes):
    """A tiny program with its weights, as shapes."""
    model = Llama(tiny_config(**changes))
    drafter = drafter or load_drafter(spec, settings or {})
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), model.shapes())
    own = jax.eval_shape(lambda key, weights: drafter.params(key, model, weights), jax.random.key(0), params)
    return decode.Program(model, drafter), params, own


def account(*arguments, batch=2, capacity=64, cache_dtype=jnp.float32, **options):
    return memory.account(
        *subject(*arguments, **options), batch=batch, capacity=capacity, cache_dtype=cache_dtype, backend=BACKEND
    )


def kv_bytes(name, batch, tokens, dtype):
    cache = jax.eval_shape(lambda: Llama(PRESETS[name]).init_cache(batch, tokens, dtype))
    return sum(nbytes(leaf) for leaf in jax.tree.leaves(cache))


def test_a_cache_worked_out_by_hand():
    found = account(
        num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, batch=3, capacity=16, cache_dtype=jnp.bfloat16
    )
    assert found.phase_bytes("verify", "kv") == 2 * 2 * 2 * 8 * 16 * 3 * 2 == 6144


@pytest.mark.parametrize(("name", "size"), [("llama-3.1-70b", 327_680), ("llama-3.1-8b", 131_072)])
def test_kv_a_token_counts_key_value_heads_not_query_heads(name, size):
    assert kv_bytes(name, 1, 1, jnp.bfloat16) == size


def test_a_batch_of_32_at_128k_needs_more_than_a_terabyte_of_kv():
    assert kv_bytes("llama-3.1-70b", 32, 131_072, jnp.bfloat16) == 1_374_389_534_720


def test_an_80_gb_card_does_not_hold_70b_in_fp8_with_7b_in_bf16():
    def left_gb(draft_dtype):
        program, params, own = subject("external", dtype=jnp.bfloat16)
        params |= {"ballast": jax.ShapeDtypeStruct((70 * 10**9,), jnp.float8_e4m3fn)}
        own |= {"ballast": jax.ShapeDtypeStruct((7 * 10**9,), draft_dtype)}
        sizes = {"batch": 1, "capacity": 16, "cache_dtype": jnp.bfloat16}
        found = memory.account(program, params, own, **sizes, backend="gpu")
        return (hardware.find("h100").hbm_bytes - found.needed_bytes) / 1e9

    assert left_gb(jnp.bfloat16) == pytest.approx(-4, abs=0.01)  # an article says about 6 GB are left
    assert left_gb(jnp.float8_e4m3fn) == pytest.approx(3, abs=0.01)  # and about 13


@pytest.mark.parametrize(
    ("spec", "settings", "weights", "kv"),
    [
        ("ngram", {}, False, False),
        ("early-exit", {}, False, False),
        ("fp8", {"kv": "shared"}, True, False),
        ("fp8", {"kv": "own"}, True, True),
        ("external", {}, True, True),
    ],
)
def test_what_each_drafter_adds(spec, settings, weights, kv):
    added = account(spec, settings).added_bytes
    assert (added["weights"] > 0, added["kv"] > 0) == (weights, kv)
    assert added["buffers"] > 0
    assert tuple(added) == GROUPS


def test_a_pruned_copy_keeps_a_cache_of_its_own_layers_only():
    found = account("external", {"keep_layers": "1"}, num_layers=4)
    target = found.bytes("target KV, committed") + found.bytes("target KV, speculative window")
    assert found.bytes("drafter KV") * 4 == target


def test_nothing_adds_nothing_and_a_window_costs_its_laws_and_slots():
    assert set(account("none").added_bytes.values()) == {0}
    found, batch, window, vocab = account("external", {"num_speculative_tokens": "3"}), 2, 3, 61
    assert found.bytes("draft probabilities") == batch * window * vocab * 4
    assert found.bytes("verification logits") == batch * (window + 1) * vocab * 4
    cache = found.bytes("target KV, committed") + found.bytes("target KV, speculative window")
    assert found.bytes("target KV, speculative window") == cache * window // 64
    assert account("ngram").bytes("draft probabilities") == 0  # a point mass


@pytest.mark.parametrize("spec", ["none", "ngram", "external", "fp8"])
def test_components_sum_to_the_peak_and_added_bytes_to_its_difference(spec):
    found = account(spec)
    for phase in PHASES:
        assert found.phase_bytes(phase) == sum(part.bytes for part in found.components if phase in part.phases)
        assert found.phase_bytes(phase) == sum(found.phase_bytes(phase, group) for group in GROUPS)
    assert min(part.bytes for part in found.components) >= 0
    assert found.needed_bytes == max(found.phase_bytes(phase) for phase in PHASES) >= found.peak_bytes
    plain = max(sum(part.bytes for part in found.baseline if phase in part.phases) for phase in PHASES)
    assert sum(found.added_bytes.values()) == found.needed_bytes - plain


@pytest.mark.parametrize("spec", ["external", "fp8"])
def test_bytes_from_shapes_are_those_of_arrays_that_exist(spec):
    model = Llama(tiny_config(num_layers=1))
    params = model.init(jax.random.key(0))
    engine = Engine(LanguageModel.of(model, params), load_drafter(spec, {"kv": "own"} if spec == "fp8" else {}))
    state = engine.start([[1, 2, 3], [4, 5]], max_new_tokens=4, seed=0)
    found = memory.account(
        engine.program, params, engine.drafter_params,
        batch=2, capacity=state.tokens.shape[1], cache_dtype=engine.cache_dtype,
    )  # fmt: skip
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves((state.cache, state.drafter)))
    assert found.phase_bytes("verify", "kv") == caches
    assert found.bytes("target weights") == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    own = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(engine.drafter_params)}
    for leaf in jax.tree.leaves(params):
        own.pop(id(leaf), None)  # the target's arrays count once
    assert found.bytes("drafter weights") == sum(own.values())
    keys = jax.random.key_data(state.keys).nbytes
    others = (leaf for leaf in jax.tree.leaves(state) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
    assert found.phase_bytes("verify", "state") == keys + sum(leaf.nbytes for leaf in others) - caches


@pytest.mark.parametrize("spec", ["ngram", "external"])
def test_more_rows_context_or_window_never_need_less(spec):
    def needed(batch, capacity, window):
        return account(spec, {"num_speculative_tokens": str(window)}, batch=batch, capacity=capacity).needed_bytes

    grid = list(itertools.product((1, 3), (32, 96), (1, 4) if spec == "ngram" else (2,)))
    sizes = {point: needed(*point) for point in grid}
    for small, big in itertools.product(grid, grid):
        if all(one <= other for one, other in zip(small, big, strict=True)):
            assert sizes[small] <= sizes[big]


@dataclass(frozen=True)
class Bush(Drafter):
    """A tree of one root with leaves."""

    def propose(self, keys, params, state, target):
        """Zeros."""
        rows, nodes = target.length.shape[0], self.num_speculative_tokens
        parents = jnp.zeros((nodes,), jnp.int32).at[0].set(-1)
        log_q = jnp.zeros((rows, nodes, target.model.vocab_size))
        return Draft(jnp.zeros((rows, nodes), jnp.int32), log_q, target.cache, state, target.length * 0, parents, 2)


def test_more_branches_never_need_less_and_a_tree_pays_for_its_mask():
    accounts = [account(drafter=Bush(nodes)) for nodes in (2, 3, 6)]
    sizes = [found.needed_bytes for found in accounts]
    assert sizes == sorted(set(sizes))
    for found, nodes in zip(accounts, (2, 3, 6), strict=True):
        assert found.bytes("tree mask") == 2 * (nodes + 1) ** 2  # rows x queries x keys of one byte


def test_a_dimension_that_the_mesh_does_not_divide_is_whole_on_every_device():
    layout = mesh.split(4, 2)
    odd, even = (jax.ShapeDtypeStruct((2, 3, vocab), jnp.float32) for vocab in (61, 64))
    assert layout.size("probs", (), odd) == nbytes(odd)
    assert layout.size("probs", (), even) * 4 == nbytes(even)


@dataclass(frozen=True)
class Remembering(Drafter):
    """A drafter with state of every kind, as a researcher might write it."""

    def init_params(self, key, model, target_params):
        """Five floats."""
        return {"mine": jnp.zeros((5,), jnp.float32)}

    def init(self, params, model, batch, capacity, dtype):
        """A cache of one layer, and a table."""
        return {"cache": kv.init_cache(1, batch, 1, 7, 2, dtype), "table": jnp.zeros((batch, 11), jnp.int32)}

    def propose(self, keys, params, state, target):
        """Zeros."""
        tokens = jnp.zeros((target.length.shape[0], self.num_speculative_tokens), jnp.int32)
        return Draft(tokens, None, target.cache, state, jnp.zeros_like(target.length))


def test_a_drafter_of_ones_own_needs_no_code_for_its_account():
    found = account(drafter=Remembering(2))
    assert found.bytes("drafter weights") == 5 * 4
    assert found.bytes("drafter KV") == 2 * (2 * 7 * 2) * 4
    assert found.bytes("drafter state") == 2 * 11 * 4


@dataclass(frozen=True)
class Tapping(Remembering):
    """The same, shown the outputs of two layers."""

    def tapped_layers(self, model):
        return (1, 3)


def test_taps_cost_a_window_and_a_chunk_and_not_the_whole_text():
    short, long = (account(drafter=Tapping(2), capacity=capacity) for capacity in (64, 128))
    for found in (short, long):
        assert (
            found.bytes("tapped hidden states, a round's") == 2 * 2 * 3 * 32 * 4
        )  # taps, rows, window, width, float32
        assert found.bytes("tapped hidden states, a prompt's chunk") == 2 * 2 * 64 * 32 * 4
    plain = account(drafter=Remembering(2), capacity=64)
    assert short.phase_bytes("verify") - plain.phase_bytes("verify") == 2 * 2 * 3 * 32 * 4


def test_weights_split_over_a_mesh_and_heads_that_do_not_divide_it_are_repeated():
    layout = mesh.split(16, 8)
    assert (layout.heads, layout.group, layout.devices) == (8, 2, 16)
    strategy = Strategy("llama-3.1-8b", "none", 1, 16)
    whole, split = (one.total("weights", strategy.shapes()[1]) for one in (mesh.Layout(), layout))
    twice = sum(nbytes(leaf[1]) for leaf in leaves(strategy, "k_proj", "v_proj"))
    everywhere = sum(nbytes(leaf[1]) for leaf in leaves(strategy, *NORMS))
    assert split * 16 == whole + twice + 15 * everywhere
    cache = jax.ShapeDtypeStruct((4, 8, 32, 128), jnp.bfloat16)
    assert layout.size("kv", (), cache) * 8 == nbytes(cache)
    odd = jax.ShapeDtypeStruct((4, 3, 32, 64), jnp.bfloat16)
    assert layout.size("kv", (), odd) == nbytes(odd)
    with pytest.raises(ValueError, match="data=3: must divide the mesh of 16 devices"):
        mesh.split(16, 8, data=3)


NORMS = ("norm", "input_layernorm", "post_attention_layernorm")


def leaves(strategy, *names):
    found = jax.tree_util.tree_flatten_with_path(strategy.shapes()[1])[0]
    return [(path, leaf) for path, leaf in found if not names or any(getattr(key, "key", "") in names for key in path)]


def test_what_is_added_a_sequence_does_not_depend_on_how_many_copies_of_the_model_share_the_rows(capsys):
    found = []
    for words in (("--batch", "1"), ("--mesh", "2", "--data", "2", "--batch", "2")):
        assert command.run(arguments(*SMALL, "--device", "h100", *words, "--json")) == 0
        found.append(json.loads(capsys.readouterr().out)[1])
    assert found[0]["added_per_sequence_bytes"] == found[1]["added_per_sequence_bytes"] > 0
    assert found[0]["peak_bytes"] == max(found[0]["phases"].values())


def test_an_account_takes_names_or_objects_and_prints_what_is_held_and_left():
    sizes = {"batch": 2, "context": 256}
    named = memory.account_for("smollm2-135m", "ngram:num_speculative_tokens=3", **sizes, device="rtx-4090")
    drafter = load_drafter("ngram", {"num_speculative_tokens": "3"})
    assert memory.account_for(Llama(PRESETS["smollm2-135m"]), drafter, **sizes, device="rtx-4090") == named
    assert named.components == Strategy("smollm2-135m", "ngram", 2, 256, 3, platform="gpu").account().components
    assert named.left_bytes == named.device.limit_bytes - named.needed_bytes > 0
    text, page = repr(named), named._repr_html_()
    for line in ("target weights", "256.57 MiB", "held at once, in verify", "usable on rtx-4090", "left"):
        assert line in text
        assert line in page
    assert "drafter weights" not in text  # nothing of it
    assert memory.account_for("smollm2-135m", "none", **sizes).device is None
    large = memory.account_for("llama-3.1-70b", "none", batch=8, context=8192, device="h100", mesh="2", data=2)
    assert large.left_bytes < 0
    assert "too much by" in repr(large)
    with pytest.raises(ValueError, match="batch=2: must be a multiple of data=4"):
        memory.account_for("smollm2-135m", "none", **sizes, device="h100", mesh="4", data=4)


def test_a_vocabulary_smaller_than_the_model_is_told_from_its_features():
    found = account(vocab_size=13, hidden_size=64, intermediate_size=96, batch=2)
    assert found.bytes("features, verify") == 96 * 2 * 4  # gate and up: [features, rows, tokens]


def test_unknown_is_not_zero():
    assert Compiled(1, 2, None, 4).total_bytes is None
    assert Compiled(10, 5, 3, 4).total_bytes == 14


def arguments(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


SMALL = ("--target", "smollm2-135m", "--drafter", "ngram", "--context", "256")


def test_the_command_prints_what_fits(capsys):
    assert command.run(arguments(*SMALL, "--device", "rtx-4090", "--json")) == 0
    plain, ngram = json.loads(capsys.readouterr().out)
    assert plain["drafter"] == "none"
    assert ngram["added_bytes"]["weights"] == ngram["added_bytes"]["kv"] == 0
    assert ngram["largest_batch"] <= plain["largest_batch"]
    assert command.run(arguments(*SMALL)) == 0
    assert "largest batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "abacus"), "unknown device 'abacus': choose from tpu-v4"),
        (("--mesh", "2y2"), "mesh '2y2': give positive sizes joined by x"),
        (("--mesh", "7"), "the 7 that share a model do not divide its 1536 features"),
        (("--data", "3"), "data=3: must divide the mesh of 1 devices"),
        (("--mesh", "2", "--data", "2"), "batch=1: must be a multiple of data=2"),
        (("--context", "9000"), "context of 9000 tokens: must be 1 to 8192"),
        (("--window", "300"), "the window does not fit into 256 cache slots"),
        (("--drafter", "external:gpt-9"), "no checkpoint 'gpt-9': give a path"),
        (("--target", "gpt-9"), "no sizes for target 'gpt-9': choose from"),
        (("--device", "this", "--mesh", "2"), "mesh '2': this machine is measured as one device"),
        (("--drafter", "nonsense"), "unknown drafter 'nonsense'"),
        (("--device", "mi300x", "--compile"), "no ahead-of-time compiler for mi300x: there is one for tpu-v4"),
    ],
)
def test_bad_input_is_refused_with_the_rule(words, message, capsys):
    assert main(["memory", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err


LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip


def test_a_config_file_is_a_target_like_a_preset(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    shown = []
    for target in ("llama-3.1-8b", str(tmp_path), str(tmp_path / "config.json")):
        assert command.run(arguments("--target", target, "--drafter", "ngram", "--context", "256", "--json")) == 0
        shown.append([fact["components"] for fact in json.loads(capsys.readouterr().out)])
    assert shown[0] == shown[1] == shown[2]


@pytest.mark.parametrize("missing", ["intermediate_size", "num_hidden_layers", "max_position_embeddings", "model_type"])
def test_a_description_without_enough_information_names_what_it_lacks(missing, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in LLAMA_8B.items() if name != missing}))
    assert main(["memory", "--target", str(path)]) == 2
    assert f"{path} lacks {missing}" in capsys.readouterr().err
    path.write_text("{")
    assert main(["memory", "--target", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": "x"}, "norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta=inf: must be a number above zero"),
        ({"vocab_size": True}, "vocab_size=True: the size of a model must be a positive integer"),
        ({"hidden_size": 10**12}, "hidden_size=1000000000000: the size of a model"),
        (
            {"model_type": "mistral", "sliding_window": -5},
            "sliding_window=-5: the size of a model must be a positive integer",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor"),
        ({"model_type": "gpt2"}, "architecture 'gpt2' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantised (gptq): take the unquantised checkpoint"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused_with_its_file_and_entry(changes, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B | changes))
    assert main(["memory", "--target", str(path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert str(path.parent) in said
    assert said.count("\n") == 1


def test_a_mesh_is_counted_a_device_and_in_all_and_what_speculation_takes_away_is_shown(capsys):
    large = ("--target", "llama-3.1-8b", "--drafter", "external:qwen3-0.6b", "--device", "h100", "--mesh", "4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "qwen3-0.6b", PRESETS["llama-3.1-8b"])  # the vocabularies must agree
        assert command.run(arguments(*large, "--batch", "4", "--json")) == 0
        plain, external = json.loads(capsys.readouterr().out)
        assert external["peak_bytes_all_devices"] == 4 * external["peak_bytes"]
        assert external["largest_batch"] < plain["largest_batch"]
        assert command.run(arguments(*large, "--batch", "4")) == 0
    shown = capsys.readouterr().out
    assert "the most, all 4 devices" in shown
    assert f"{1 - external['largest_batch'] / plain['largest_batch']:.1%}" in shown


def test_a_tpu_pads_narrow_heads_and_takes_rows_of_an_odd_embedding_from_a_padded_copy():
    tpu, gpu = (Strategy("smollm2-135m", "external", 2, 64, platform=name).account() for name in ("tpu", "gpu"))
    for name in ("target KV, committed", "drafter KV"):
        assert tpu.bytes(name) == 2 * gpu.bytes(name)  # heads of 64 in lanes of 128
    copy = 49_152 * 640 * 2  # 576 wide
    assert tpu.bytes("embedding, padded, target") == tpu.bytes("embedding, padded, drafter") == copy
    assert gpu.bytes("embedding, padded, target") == 0
    even = Strategy("llama-3.1-8b", "ngram", 2, 64).account()
    assert even.bytes("embedding, padded, target") == 0
    assert Strategy("smollm2-135m", "early-exit", 2, 64).account().bytes("embedding, padded, drafter") == 0


@pytest.mark.parametrize(("device", "extra"), [("tpu-v5e", "tpu-aot"), ("h100", "cuda-aot")])
def test_a_missing_compiler_names_the_extra(device, extra, monkeypatch):
    monkeypatch.setattr(aot, "_spec", lambda module: None)
    with pytest.raises(aot.CompilerMissingError, match=rf"pip install 'specjax\[{extra}\]'"):
        aot.check_installed(hardware.find(device))


@pytest.mark.parametrize("device", hardware.DEVICES.values(), ids=lambda device: device.name)
def test_every_device_has_a_source_and_plausible_sizes(device):
    assert device.source
    assert 0 < device.limit_bytes <= device.hbm_bytes
    assert 50 < device.bf16_flop_per_s / device.bandwidth_bytes_per_s < 700  # operations a byte, at the ridge
