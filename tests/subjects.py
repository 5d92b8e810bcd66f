"""What the tests of decoding share: a plain decoder in numpy, and programs that compile quickly.

The plain decoder knows nothing of specjax but the names of the weights: whole text in, logits out,
float64, no cache. Decoding is right where it agrees with it.
"""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax import decode, plugins, sampling, testing
from specjax.drafter import Drafter, Wrapper
from specjax.types import Draft, Prompts

CAPACITY, BATCH, LONGEST = 64, 3, 33


def tiny():
    """Three layers, grouped-query attention, 29 ids."""
    return testing.tiny_model(
        num_layers=3, hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=29
    )


def plain_logits(config, params, tokens):
    """Logits after every token of one text."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    half = config.head_dim // 2
    angle = np.outer(np.arange(len(tokens)), config.rope_theta ** (-np.arange(half) / half))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    distance = np.arange(len(tokens))[:, None] - np.arange(len(tokens))[None]
    hidden = (distance < 0) | (distance >= (config.sliding_window or len(tokens) + 1))

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight

    def heads(x, weight, rotate):
        x = (x @ weight.T).reshape(len(tokens), -1, config.head_dim)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1) if rotate else x

    x = p["embed_tokens"]["weight"][np.asarray(tokens)]
    for index in range(config.num_layers):
        layer = p["layers"][index]
        attention, mlp = layer["self_attn"], layer["mlp"]
        y = norm(x, layer["input_layernorm"]["weight"])
        q = heads(y, attention["q_proj"]["weight"], True)
        k = heads(y, attention["k_proj"]["weight"], True).repeat(config.num_heads // config.num_kv_heads, 1)
        v = heads(y, attention["v_proj"]["weight"], False).repeat(config.num_heads // config.num_kv_heads, 1)
        scores = np.einsum("shd,thd->hst", q, k) / np.sqrt(config.head_dim)
        scores = np.where(hidden, -np.inf, scores)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        x = x + np.einsum("hst,thd->shd", weight, v).reshape(len(tokens), -1) @ attention["o_proj"]["weight"].T
        y = norm(x, layer["post_attention_layernorm"]["weight"])
        gate = y @ mlp["gate_proj"]["weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp["up_proj"]["weight"].T)) @ mlp["down_proj"]["weight"].T
    head = p["embed_tokens" if config.tied_embeddings else "lm_head"]["weight"]
    return (norm(x, p["norm"]["weight"]) @ head.T)[:, : config.vocab_size]


def plain_greedy(model, params, prompt, count):
    """`count` tokens of greedy text, and the smallest gap between the two best logits on the way."""
    text, gap = list(prompt), np.inf
    for _ in range(count):
        logits = plain_logits(model.config, params, text)[-1]
        second, first = np.sort(logits)[-2:]
        gap = min(gap, first - second)
        text.append(int(np.argmax(logits)))
    return text[len(prompt) :], gap


def greedy_texts(model, params):
    """`[(prompt, continuation)]` for prompts of 1 to 9 tokens; some repeat themselves."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in range(1, 10)]
    prompts[5] = [3, 4, 5, 3, 4, 5]
    prompts[7] = [7, 7, 7, 7, 7, 7, 7, 7]
    return [(prompt, plain_greedy(model, params, prompt, LONGEST)[0]) for prompt in prompts]


@dataclasses.dataclass(frozen=True)
class Tampered(Wrapper):
    """Runs `inner`, spoils its draft at position `accept[b]`, and may fill every stale slot with 1e4.

    `params` is `{"inner", "accept": [B], "poison": [B]}`; `accept >= K` spoils nothing.
    """

    def init(self, params, model, batch, capacity, dtype):
        return self.inner.init(params["inner"], model, batch, capacity, dtype)

    def observe(self, params, state, seen):
        return self.inner.observe(params["inner"], state, seen)

    def propose(self, keys, params, state, target):
        slot = jnp.arange(target.tokens.shape[1], dtype=jnp.int32)[None]
        poison = params["poison"][:, None, None, None]
        cache = jax.tree.map(
            lambda leaf, bad: jnp.where(poison & bad, jnp.asarray(1e4, leaf.dtype), leaf),
            target.cache,
            kv.scratch(target.cache, target.length - 1),
        )
        ahead = params["poison"][:, None] & (slot >= target.length[:, None])
        tokens = jnp.where(ahead, 7, target.tokens)
        draft = self.inner.propose(
            keys, params["inner"], state, dataclasses.replace(target, cache=cache, tokens=tokens)
        )
        steps = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
        wrong = (draft.tokens + 1) % target.model.vocab_size
        spoilt = jnp.where(steps == params["accept"][:, None], wrong, draft.tokens)
        return dataclasses.replace(draft, tokens=spoilt)


ORACLE, HOSTILE, SILENT, FLICKER = range(4)


@dataclasses.dataclass(frozen=True)
class Scripted(Drafter):
    """The shipped test drafters, a row each: `params["kind"]` chooses. `FLICKER` is silent every second length."""

    def propose(self, keys, params, state, target):
        k = self.num_speculative_tokens
        drafts = [
            kind(k).propose(keys, params, state, target) for kind in (testing.Oracle, testing.Hostile, testing.Silent)
        ]
        flicker = jnp.where(target.length % 2 == 0, k, 0)
        tokens = jnp.stack([draft.tokens for draft in drafts] + [drafts[0].tokens])
        full = jnp.full(target.length.shape, k, jnp.int32)
        counts = jnp.stack([full if draft.count is None else draft.count for draft in drafts] + [flicker])
        row = jnp.arange(target.length.shape[0])
        return Draft(tokens[params["kind"], row], None, target.cache, state, counts[params["kind"], row])


def drafters(k):
    """Every drafter of the repository that drafts, by the name that a report gives it."""
    number = {"num_speculative_tokens": str(k)}
    return {
        "ngram": plugins.load_drafter("ngram", number),
        "early-exit": plugins.load_drafter("early-exit", number),
        "external": plugins.load_drafter("external", number),
        "fp8-shared": plugins.load_drafter("fp8", number | {"kv": "shared"}),
        "fp8-own": plugins.load_drafter("fp8", number | {"kv": "own"}),
    }


NAMES = ("ngram", "early-exit", "external", "fp8-shared", "fp8-own")

# The same Python functions as in `decode`, compiled without LLVM's optimisations and XLA's newer fusions: a third of
# the time, and these tests need many programs. tests/test_contract.py runs the programs as shipped.
QUICK = {
    "xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True, "xla_cpu_use_fusion_emitters": False
}  # fmt: skip


def parameters(function):
    return inspect.signature(function.__wrapped__).parameters


SHIPPED = {
    name: getattr(decode, name) for name in ("empty", "read_chunk", "observe_chunk", "first_token", "run", "step")
}
QUICKLY = {
    name: jax.jit(
        function.__wrapped__,
        static_argnames=[key for key in ("program", "model", "cache_dtype", "taps") if key in parameters(function)],
        donate_argnames=[key for key in ("state", "cache") if key in parameters(function)],
        compiler_options=QUICK,
    )
    for name, function in SHIPPED.items()
}


def compile_quickly(monkeypatch):
    """Let `decode` use the quickly compiled functions."""
    for name, function in QUICKLY.items():
        monkeypatch.setattr(decode, name, function)


def compilations():
    """How many programs each of the quickly compiled functions has."""
    return [function._cache_size() for function in QUICKLY.values()]


@dataclasses.dataclass(frozen=True)
class Rows:
    """A finished batch on the host."""

    tokens: list[list[int]]  # generated ones
    counts: list[Any]  # of each row, a dict of arrays with an entry a round
    state: decode.State


def run_rows(
    model, params, drafter, drafter_params, prompts, new, *, temperature=0.0, seed=0, rows=None, end_ids=(),
    capacity=CAPACITY, sampler=None,
):  # fmt: skip
    """Decode a batch with a limit of its own for each row."""
    state = start_rows(
        model, params, drafter, drafter_params, prompts, new, temperature=temperature, seed=seed, rows=rows,
        end_ids=end_ids, capacity=capacity, sampler=sampler,
    )  # fmt: skip
    state = QUICKLY["run"](decode.Program(model, drafter), params, drafter_params, state)
    return collect(state, prompts)


def start_rows(
    model, params, drafter, drafter_params, prompts, new, *, temperature=0.0, seed=0, rows=None, end_ids=(),
    capacity=CAPACITY, sampler=None,
):  # fmt: skip
    """The state after prefill."""
    batch = len(prompts)
    tokens = np.zeros((batch, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    length = np.asarray([len(prompt) for prompt in prompts], np.int32)
    ends = np.full((8,), -1, np.int32)
    ends[: len(end_ids)] = list(end_ids)
    batch = Prompts(
        jnp.asarray(tokens),
        jnp.asarray(length),
        jnp.asarray(length + np.broadcast_to(np.asarray(new, np.int32), (batch,))),
        sampling.row_keys(seed, range(batch) if rows is None else rows),
        jnp.asarray(ends),
        sampler or sampling.make_sampling(batch, temperature),
    )
    program = decode.Program(model, one_token(drafter))  # what it holds after the prompt does not depend on K
    with pytest.MonkeyPatch.context() as patch:
        compile_quickly(patch)
        return decode.start(program, params, drafter_params, batch, jnp.dtype(jnp.float32), int(length.max()))


def one_token(drafter):
    """The same drafter with K = 1."""
    if isinstance(drafter, Tampered):
        return dataclasses.replace(drafter, inner=one_token(drafter.inner))
    return dataclasses.replace(drafter, num_speculative_tokens=1) if drafter.num_speculative_tokens else drafter


def collect(state, prompts):
    """Tokens and counts of a finished state."""
    tokens, length, rounds, counts = jax.device_get((state.tokens, state.length, state.round, state.counts))
    texts = [tokens[row, len(prompt) : length[row]].tolist() for row, prompt in enumerate(prompts)]
    per_row = [
        {field.name: getattr(counts, field.name)[row, : rounds[row] - 1] for field in dataclasses.fields(counts)}
        for row in range(len(prompts))
    ]
    return Rows(texts, per_row, state)


@functools.cache
def tampered(name, k):
    """The drafter `name` under `Tampered`, so that one program serves every test of it."""
    return Tampered(inner=drafters(k)[name])


def tamper(weights, accept, poison=False, batch=BATCH):
    """Parameters of `Tampered`."""
    return {
        "inner": weights,
        "accept": jnp.broadcast_to(jnp.asarray(accept, jnp.int32), (batch,)),
        "poison": jnp.broadcast_to(jnp.asarray(poison, bool), (batch,)),
    }


def transparent(model, params):
    """Weights with which every model drafter is the target itself.

    All layers but the first add nothing, so that an early exit and a pruned copy are the whole model; and
    linear weights are e4m3 numbers times a power of two, so that quantising them loses nothing.
    """
    from specjax.model.decoder import FP8

    def exact(weight):
        weight = np.asarray(weight, np.float32)
        scale = 2.0 ** np.ceil(np.log2(np.abs(weight).max(1, keepdims=True) / 448))
        rounded = np.array(jnp.asarray(weight / scale).astype(FP8).astype(jnp.float32))
        rounded[np.arange(len(rounded)), np.abs(rounded).argmax(1)] = 448  # so that absmax / 448 is a power of two
        return jnp.asarray(rounded * scale)

    layers = {}
    for index, layer in params["layers"].items():
        layer = jax.tree.map(lambda leaf: exact(leaf) if leaf.ndim == 2 else leaf, layer)
        if index > 0:
            layer["self_attn"]["o_proj"]["weight"] *= 0
            layer["mlp"]["down_proj"]["weight"] *= 0
        layers[index] = layer
    return params | {"layers": layers}


def own_weights(model, params):
    """Each drafter's own weights."""
    return {name: d.params(jax.random.key(0), model, params) for name, d in drafters(1).items()}


def limits(k):
    return sorted({0, 1, 2, k - 1, k, k + 1, LONGEST})


def check_greedy(batch, rows):
    for (limit, (prompt, text)), tokens, counts in zip(batch, rows.tokens, rows.counts, strict=True):
        assert tokens == text[:limit], (prompt, limit)
        assert counts["emitted"].sum() == max(0, limit - 1)  # the first token belongs to no round


def clean_prefill(model, params, tokens, length):
    """The cache of one pass over the text."""
    tokens = jnp.asarray(tokens)
    cache = model.init_cache(*tokens.shape, jnp.float32)
    forward = jax.jit(lambda p, t, n, c: model.forward(p, t, c, jnp.zeros_like(n)).cache)
    return forward(params, tokens, jnp.asarray(length), cache)


def assert_same_slots(got, want, real):
    """Equal on the first `real[b]` slots."""
    mask = np.arange(want.capacity)[None] < np.asarray(real)[:, None]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.where(mask[:, None, :, None], a, 0), np.where(mask[:, None, :, None], b, 0), rtol=1e-4, atol=3e-4
        )
