"""The decoder against transformers, and against itself fed in other pieces."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from fixtures_weights import PROMPTS, smollm2  # noqa: F401

from specjax.model import Llama, ModelConfig
from specjax.model.config import from_huggingface
from specjax.weights import open_checkpoint

torch.set_num_threads(1)  # its threads wait for each other, which on a busy machine costs more than they bring

BATCH, LENGTH = 2, 12
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "attn_implementation": "eager",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES = {
    "llama2-multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama-grouped-tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama3-scaled": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-scaled": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}),
    "mistral-window-5": ("Mistral", {"sliding_window": 5, "head_dim": 16}),
    "qwen2-full-layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"] * 3},
    ),
    "qwen3-window-5": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 3},
    ),
    "qwen3-window-from-layer-0": ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen2-bias": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3-wide-heads": ("Qwen3", {"head_dim": 24}),
    "qwen3-tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


def random_transformers_model(kind, **changes):
    """All weights random, norms and biases too, at a scale that makes logits of order one."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0, 0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5, generator=generator)
            if "norm" in name:
                weight.add_(1)
    return model


def tokens(length=LENGTH, vocab=97, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, (BATCH, length)).astype(np.int32)


QUICK = {"xla_backend_optimization_level": 0}  # most of these programs run once: compiling is what they cost


@functools.partial(jax.jit, static_argnames=("model", "layers", "taps"), compiler_options=QUICK)
def run(model, params, ids, cache, start, positions=None, mask=None, layers=None, taps=()):
    out = model.forward(params, ids, cache, start, positions=positions, mask=mask, layers=layers, taps=taps)
    return model.logits(params, out.hidden), out.hidden, out.taps, out.cache


def whole(model, params, ids, **options):
    cache = model.init_cache(ids.shape[0], 32, jnp.float32)
    return run(model, params, jnp.asarray(ids), cache, jnp.zeros(ids.shape[0], jnp.int32), **options)


@pytest.mark.parametrize("shards", ["one file", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path, family, shards):
    kind, changes = FAMILIES[family]
    theirs = random_transformers_model(kind, **changes)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "sharded" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "sharded")
    checkpoint = open_checkpoint(str(tmp_path))
    ours, _, _, _ = whole(Llama(checkpoint.config), checkpoint.load(jnp.float32), tokens())
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens())).logits.numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
    assert np.abs(np.asarray(ours) - expected[:, ::-1]).max() > 0.1  # the comparison can fail


def test_running_some_layers_equals_transformers_hidden_states(tmp_path):
    theirs = random_transformers_model("Qwen3", head_dim=24)
    theirs.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    model, params = Llama(checkpoint.config), checkpoint.load(jnp.float32)
    with torch.no_grad():
        states = theirs(torch.tensor(tokens()), output_hidden_states=True).hidden_states
    for count in (0, 1, 2):  # transformers' last entry has gone through the final norm
        _, hidden, _, _ = whole(model, params, tokens(), layers=(0, count))
        np.testing.assert_allclose(hidden, states[count].numpy(), atol=1e-5)
    _, _, taps, _ = whole(model, params, tokens(), taps=(2, 1))
    assert len(taps) == 2
    for tap, count in zip(taps, (2, 1), strict=True):  # in the drafter's order
        np.testing.assert_allclose(tap, states[count].numpy(), atol=1e-5)
    with pytest.raises(ValueError, match=r"taps \(99,\): layers 1 to 3 run"):
        whole(model, params, tokens(), taps=(99,))


def test_layers_that_do_not_run_leave_their_cache_alone(small):
    model, params = small
    _, _, _, cache = whole(model, params, tokens(), layers=(0, 1))
    assert all(np.asarray(part).any() for part in cache.layers[0])
    assert not any(np.asarray(part).any() for part in cache.layers[1])


@pytest.fixture(scope="module", params=[None, 5], ids=["full attention", "window 5"])
def small(request):
    model = Llama(ModelConfig(97, 32, 48, 2, 4, 2, 8, 64, sliding_window=request.param, qk_norm=True))
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.normal(len(leaf.shape) == 1, leaf.shape[-1] ** -0.5, leaf.shape)  # noqa: E731  norms near 1
    return model, jax.tree.map(lambda leaf: jnp.asarray(draw(leaf), jnp.float32), model.shapes())


@pytest.mark.parametrize("chunk", [1, 3, 4, LENGTH])
@pytest.mark.parametrize("offset", [0, 4])
def test_whole_equals_chunks_equals_one_by_one_from_any_offset(small, chunk, offset):
    """Row 1 begins `offset` tokens later: its first tokens are in the cache already."""
    model, params = small
    ids = tokens(LENGTH + 4)
    expected, _, _, _ = whole(model, params, ids)
    _, _, _, cache = (
        whole(model, params, ids[:, :offset]) if offset else (0, 0, 0, model.init_cache(BATCH, 32, jnp.float32))
    )
    for at in range(0, LENGTH, chunk):
        start = np.array([at, at + offset], np.int32)
        size = min(chunk, LENGTH - at)
        rows = np.stack([row[begin : begin + size] for row, begin in zip(ids, start, strict=True)])
        logits, _, _, cache = run(model, params, jnp.asarray(rows), cache, jnp.asarray(start))
        for row, begin in enumerate(start):
            np.testing.assert_allclose(logits[row], expected[row, begin : begin + size], atol=1e-5)


def test_stale_slots_change_nothing(small):
    model, params = small
    ids, start = tokens(), jnp.array([4, 7], jnp.int32)
    _, _, _, clean = whole(model, params, ids)
    slot = jnp.arange(32)[None, None, :, None]
    stale = jax.tree.map(lambda part: jnp.where(slot < start[:, None, None, None], part, 1e4), clean)
    window = jnp.asarray(np.stack([ids[0, 4:7], ids[1, 7:10]]))
    expected, _, _, _ = run(model, params, window, clean, start)
    got, _, _, _ = run(model, params, window, stale, start)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("parents", [(-1, 0, 1, 2, 3, 4), (-1, 0, 0, 1, 1, 2), (-1, -1, 0, 1, 1, 4)])
@pytest.mark.parametrize("mask_rank", [2, 3])
def test_each_path_of_a_tree_equals_the_same_path_fed_as_a_chain(small, parents, mask_rank):
    """Node i's parent is `parents[i]`; -1 is the last committed token. Rows stand at different offsets."""
    model, params = small
    count, start = len(parents), jnp.array([3, 8], jnp.int32)
    prefix, nodes = tokens(8), tokens(count, seed=1)
    paths = [[] for _ in parents]
    for node, parent in enumerate(parents):
        paths[node] = [*(paths[parent] if parent >= 0 else []), node]
    depth = jnp.array([len(path) - 1 for path in paths], jnp.int32)
    mask = jnp.array([[column in path for column in range(count)] for path in paths])
    if mask_rank == 3:
        mask = jnp.stack([mask] * BATCH)
    positions = start[:, None] + depth[None]
    _, _, _, cache = whole(model, params, prefix)
    logits, _, _, _ = run(model, params, jnp.asarray(nodes), cache, start, positions=positions, mask=mask)
    for node, path in enumerate(paths):
        padded = np.zeros((BATCH, count), np.int32)
        padded[:, : len(path)] = nodes[:, path]
        chain, _, _, _ = run(model, params, jnp.asarray(padded), cache, start)
        np.testing.assert_allclose(logits[:, node], chain[:, len(path) - 1], atol=1e-5)


@pytest.mark.parametrize("levels", [(1, 2, 3), (2, 2, 2), (1, 1, 1, 1, 1, 1)])
def test_a_tree_grown_level_by_level_on_the_cache_equals_the_tree_in_one_pass(small, levels):
    """As a drafter grows it: each level is a pass of its own, and sees its ancestors only, not their neighbours."""
    model, params = small
    start, prefix = jnp.array([3, 8], jnp.int32), tokens(8)
    nodes = tokens(sum(levels), seed=1)
    bounds = np.cumsum((0, *levels))
    depth = np.repeat(np.arange(len(levels)), levels)
    parent = [-1 if d == 0 else int(bounds[d - 1] + i % levels[d - 1]) for i, d in enumerate(depth)]
    above = np.eye(len(parent), dtype=bool)
    for node, up in enumerate(parent):
        above[node] |= above[up] if up >= 0 else False
    positions = start[:, None] + jnp.asarray(depth, jnp.int32)[None]
    _, _, _, cache = whole(model, params, prefix)
    expected, _, _, _ = run(
        model, params, jnp.asarray(nodes), cache, start, positions=positions, mask=jnp.asarray(above)
    )
    for low, high in itertools.pairwise(bounds):
        logits, _, _, cache = run(
            model, params, jnp.asarray(nodes[:, low:high]), cache, start + low, positions=positions[:, :high],
            mask=jnp.asarray(above[low:high, :high]),
        )  # fmt: skip
        np.testing.assert_allclose(logits, expected[:, low:high], atol=1e-5)
    sibling_seen, _, _, _ = run(model, params, jnp.asarray(nodes[:, -1:]), cache, start + len(parent) - 1)
    assert len(levels) == 6 or np.abs(sibling_seen - expected[:, -1:]).max() > 1e-2  # the comparison can fail


def test_a_pass_without_a_cache_equals_one_with_it_and_has_a_gradient(small):
    model, params = small
    ids, start = jnp.asarray(tokens()), jnp.zeros(BATCH, jnp.int32)
    expected, hidden, taps, _ = whole(model, params, tokens(), taps=(1,))
    out = model.forward(params, ids, None, start, taps=(1,))
    np.testing.assert_allclose(out.hidden, hidden, atol=1e-5)
    np.testing.assert_allclose(out.taps[0], taps[0], atol=1e-5)
    assert out.cache.layers == ()

    def loss(params):
        return -jnp.mean(
            jax.nn.log_softmax(model.logits(params, model.forward(params, ids, None, start).hidden))[..., 3]
        )

    value, gradient = jax.value_and_grad(loss)(params)
    direction = jax.tree.map(lambda leaf: jnp.sin(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape), params)
    slope = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    moved = [loss(jax.tree.map(lambda a, b: a + sign * 1e-3 * b, params, direction)) for sign in (1, -1)]  # noqa: B023
    assert float(slope) == pytest.approx(float(moved[0] - moved[1]) / 2e-3, rel=0.02)
    assert np.isfinite(value)


def test_documents_in_one_row_know_nothing_of_each_other(small):
    model, params = small
    first, second = tokens(5), tokens(7, seed=1)
    row = jnp.asarray(np.concatenate([first, second], 1))
    documents = jnp.asarray(np.repeat([[4, 9]] * BATCH, [5, 7], axis=1))
    start = jnp.zeros(BATCH, jnp.int32)
    packed = model.forward(params, row, None, start, documents=documents).hidden
    for alone, part in ((first, packed[:, :5]), (second, packed[:, 5:])):
        np.testing.assert_allclose(part, model.forward(params, jnp.asarray(alone), None, start).hidden, atol=1e-5)


def test_embeddings_stand_in_for_tokens_and_a_stack_of_layers_goes_on_where_another_ended(small):
    model, params = small
    ids, start = jnp.asarray(tokens()), jnp.zeros(BATCH, jnp.int32)
    whole_pass = model.forward(params, ids, None, start).hidden
    embedded = model.forward(params, model.embed(params, ids), None, start).hidden
    np.testing.assert_array_equal(embedded, whole_pass)
    below = model.forward(params, ids, None, start, layers=(0, 1)).hidden
    np.testing.assert_allclose(model.forward(params, below, None, start, layers=(1, 2)).hidden, whole_pass, atol=1e-6)


def test_padding_of_the_embedding_has_no_logits(small):
    model, params = small
    wide = Llama(dataclasses.replace(model.config, padded_vocab_size=128))
    pad = lambda weight: jnp.pad(weight, ((0, 31), (0, 0)), constant_values=50.0)  # noqa: E731
    padded = params | {name: {"weight": pad(params[name]["weight"])} for name in ("embed_tokens", "lm_head")}
    np.testing.assert_allclose(whole(wide, padded, tokens())[0], whole(model, params, tokens())[0], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "llama", "sliding_window": 7}, None),
        ({"model_type": "qwen2", "sliding_window": 7}, None),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, 7),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, None),
    ],
)
def test_a_sliding_window_is_read_as_each_family_means_it(change, window):
    assert from_huggingface(SIZES | change).sliding_window == window


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"layer_types": ["full_attention"] * 3, "sliding_window": 5}, None),
        ("mistral", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 5}, 5),
        ("mistral", {}, 4096),  # transformers' default
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 5}, None),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True}, None),  # max_window_layers is 28
        ("llama", {"sliding_window": 5}, None),
    ],
)
def test_the_window_is_that_of_transformers(family, changes, window):
    assert from_huggingface({"model_type": family} | SIZES | changes).sliding_window == window


@pytest.mark.parametrize(
    "changes",
    [
        {"max_window_layers": 1},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"layer_types": ["linear_attention"] * 3},
        {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
    ],
)
def test_a_window_in_some_layers_only_is_refused(changes):
    described = {"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True} | SIZES | changes
    with pytest.raises(ValueError, match="layers of kind .* are not supported"):
        from_huggingface(described)


def test_smollm2_continues_as_transformers_does(smollm2):  # noqa: F811
    """Each of our greedy tokens is the largest logit of transformers, given the tokens before it.

    By induction that is equality of the two greedy continuations, for one forward pass a prompt.
    """
    model, params, tokenizer = Llama(smollm2.config), smollm2.load(jnp.float32), smollm2.tokenizer()
    theirs = transformers_twin(model.config, params)
    prompts = [tokenizer.chat(text) for text in sorted(PROMPTS, key=len)[:10]]
    emitted = greedy(model, params, prompts, 64)
    for prompt, ours in zip(prompts, emitted, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + ours[:-1]]), logits_to_keep=len(ours)).logits[0]
        assert ours == logits.argmax(-1).tolist()


def transformers_twin(config, params):
    """A transformers model with the very same weights."""
    twin = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.context_length,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=True,
        )
    ).eval()
    leaves, _ = jax.tree.flatten_with_path(params)
    weights = {
        "model." + jax.tree_util.keystr(path, simple=True, separator="."): torch.tensor(np.asarray(leaf))
        for path, leaf in leaves
    }
    missing, extra = twin.load_state_dict(weights, strict=False)
    assert (missing, extra) == (["lm_head.weight"], [])
    return twin


def greedy(model, params, prompts, count):
    """Greedy continuations of prompts of different lengths, in one batch."""
    lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    slots = int(lengths.max()) + count
    ids = np.zeros((len(prompts), slots - count), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt

    @jax.jit
    def generate(params, ids):
        cache = model.init_cache(len(prompts), slots, jnp.float32)
        out = model.forward(params, ids, cache, jnp.zeros_like(lengths))
        last = jnp.take_along_axis(out.hidden, (lengths - 1)[:, None, None], 1)

        def step(carry, _):
            hidden, cache, at = carry
            token = jnp.argmax(model.logits(params, hidden)[:, 0], -1).astype(jnp.int32)
            out = model.forward(params, token[:, None], cache, at)
            return (out.hidden, out.cache, at + 1), token

        return jax.lax.scan(step, (last, out.cache, lengths), length=count)[1]

    return np.asarray(generate(params, jnp.asarray(ids))).T.tolist()
