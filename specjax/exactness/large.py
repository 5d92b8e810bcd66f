"""Vocabularies whose laws can't be enumerated: every emitted token under the target's own law.

A token x drawn from p, with the ids in any order that is fixed beforehand, gives F(x-) + v p(x) with v
uniform: uniform on [0, 1] and independent of the past (Rosenblatt 1952). The order here is log q - log p
of the round's draft: an acceptance or residual fault favours what the drafter favours and moves mass
along it. p comes from a pass of its own over committed tokens only, in a cache that no draft has touched.
A second test compares whole continuations with plain decoding.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key
from scipy.stats import chi2

from specjax import decode, sampling, verify, weights
from specjax import drafter as drafters
from specjax.drafter import Drafter
from specjax.exactness import compatibility, identity, lab, statistics
from specjax.exactness.report import APPROXIMATE, FAIL, INCONCLUSIVE, PASS, Case, Report
from specjax.exactness.sampler import Setting
from specjax.exactness.statistics import Result
from specjax.model import Llama
from specjax.types import Cache, Draft, Model, Params

SETTING = Setting(0.8, top_p=0.95)
SEQUENCES, NEW_TOKENS, BATCH, BINS, PAIR_BINS, PERMUTATIONS = 64, 32, 16, 16, 5, 9999
DETECT = 0.15
SHARES = {"transform": 0.5, "dependence": 0.25, "two-sample": 0.25}
PROMPTS = (
    "The capital of France is", "Once upon a time there was a", "To make a good soup you need",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return", "The three primary colours are",
    "My favourite season is", "Water boils at", "She opened the old box and found",
)  # fmt: skip


def check_large(
    drafter: Drafter | str,
    target: str | tuple[Model, Params, Sequence[Sequence[int]]] = "smollm2-135m",
    *,
    rule: verify.Rule | None = None,
    setting: Setting = SETTING,
    sequences: int = SEQUENCES,
    new_tokens: int = NEW_TOKENS,
    batch: int = BATCH,
    alpha: float = lab.ALPHA,
    detect: float = DETECT,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Test a drafter and a rule on a target of any vocabulary.

    Args:
      target: a checkpoint, or a model with its weights and prompts (token ids).
      detect: total variation of the transform's law from uniform that must be caught with 99 % probability.

    Raises:
      ValueError: a tree of drafts, or options out of range.
    """
    began = time.perf_counter()
    rule = rule or verify.Token()
    drafter = drafters.load(drafter) if isinstance(drafter, str) else drafter
    name, model, params, prompts = _target(target)
    drafter.check(model)
    prompts = [prompts[i % len(prompts)] for i in range(-(-sequences // batch) * batch)]
    program = decode.Program(model, drafter, rule)
    options = (params, prompts, setting, new_tokens, batch)
    values, texts = _decode(program, *options, seed, progress)
    _, plain = _decode(decode.Program(model, drafters.Nothing()), *options, seed + 1, progress, transform=False)

    results = [*transform_tests(values), two_sample_test(texts, plain, prompts, seed)]
    gate, identities = identity.check_rule(rule)
    results = [*lab.adjust(results, SHARES), *identities]
    total = int(np.isfinite(values).sum())
    uniform = np.full(BINS, 1 / BINS)
    level = alpha * SHARES["transform"] / sum(r.test == "transform" for r in results)
    detectable = statistics.detectable(total, uniform, level)
    rejected = any(result.adjusted <= alpha for result in results)
    verdict = FAIL if rejected else INCONCLUSIVE if detectable > detect else PASS
    counts = np.append(np.histogram(values[np.isfinite(values)], BINS, (0, 1))[0], 0)
    return Report(
        verdict=APPROXIMATE if compatibility.is_approximate(rule) else verdict,
        subject=name,
        drafter=str(drafter),
        rule=str(rule),
        proven=verify.is_exact(rule),
        settings=(str(setting),),
        samples=len(prompts),
        tokens=new_tokens,
        alpha=alpha,
        detect=detect,
        detectable=detectable,
        needed=math.ceil(statistics.samples_needed(detect, uniform, level) * len(prompts) / max(total, 1)),
        results=tuple(results),
        gate=gate,
        cases=(Case("probability-integral transform", uniform, counts.astype(float), detectable, 0.0),),
        seconds=time.perf_counter() - began,
        method=f"probability-integral transform of {total:,} tokens under the target's own law, against plain decoding",
    )


def _target(target: Any) -> tuple[str, Model, Params, list[list[int]]]:
    if not isinstance(target, str):
        model, params, prompts = target
        return type(model).__name__, model, params, [list(prompt) for prompt in prompts]
    checkpoint = weights.open_checkpoint(target)
    tokenizer = checkpoint.tokenizer()
    return target, Llama(checkpoint.config), checkpoint.load(jnp.float32), [tokenizer.encode(text) for text in PROMPTS]


def _decode(
    program: decode.Program, params: Params, prompts: Sequence[Sequence[int]], setting: Setting, new_tokens: int,
    batch: int, seed: int, progress: Callable[[str], None], transform: bool = True,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Transformed values [sequences, new_tokens] (NaN for the first token) and the tokens themselves."""
    own = program.drafter.params(jax.random.key(0), program.model, params)
    longest = max(len(prompt) for prompt in prompts)
    values = np.full((len(prompts), new_tokens), np.nan)
    texts = np.zeros((len(prompts), new_tokens), np.int64)
    for first in range(0, len(prompts), batch):
        rows = range(first, first + batch)
        tokens = np.zeros((batch, longest + new_tokens + program.drafter.num_speculative_tokens), np.int32)
        for row in rows:
            tokens[row - first, : len(prompts[row])] = prompts[row]
        length = np.array([len(prompts[row]) for row in rows], np.int32)
        state = decode.start(
            program, params, own, jnp.asarray(tokens), jnp.asarray(length), jnp.asarray(length + new_tokens),
            sampling.row_keys(seed, rows), jnp.full((1,), -1, jnp.int32),
            sampling.make_sampling(batch, setting.temperature, setting.top_k, setting.top_p, setting.min_p),
            cache_dtype=jnp.float32,
        )  # fmt: skip
        if transform:
            state = _watched(program, params, own, state, length, values[first : first + batch], seed)
        else:
            state = decode.run(program, params, own, state)
        got = np.asarray(state.tokens)
        for row in rows:
            texts[row] = got[row - first, len(prompts[row]) : len(prompts[row]) + new_tokens]
        progress(f"{program.drafter}: {first + batch} of {len(prompts)} sequences")
    return values, texts


def _watched(
    program: decode.Program, params: Params, own: Params, state: decode.State, first: np.ndarray,
    values: np.ndarray, seed: int,
) -> decode.State:  # fmt: skip
    """Decode to the end; every round's tokens are transformed under laws from a cache that sees no drafts."""
    cache = _read(program.model, params, state.tokens, state.length - 1)
    noise = jax.random.fold_in(jax.random.key(seed), 1 << 20)
    while not bool(jnp.all(state.done)):
        before = np.asarray(state.length)
        state, cache, got, real = _round(program, params, own, state, cache, noise)
        noise = jax.random.fold_in(noise, 1)
        index = before[:, None] - first[:, None] + np.arange(got.shape[1])
        for row, column in zip(*np.nonzero(np.asarray(real)), strict=True):
            values[row, index[row, column]] = got[row, column]
    return state


@functools.partial(jax.jit, static_argnames=("model",))
def _read(model: Model, params: Params, tokens: Int[Array, "B T"], length: Int[Array, "B"]) -> Cache:
    cache = model.init_cache(tokens.shape[0], tokens.shape[1], jnp.float32)
    return decode.prefill(model, params, tokens, length, cache)[2]


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("cache",))
def _round(
    program: decode.Program, params: Params, own: Params, state: decode.State, cache: Cache, noise: Key[Array, ""]
) -> tuple[decode.State, Cache, Float[Array, "B S"], Bool[Array, "B S"]]:
    draft = decode.propose(program, params, own, state)
    if draft.parents is not None:
        raise ValueError(f"drafter {program.drafter} drafts trees: the transform orders tokens along a chain only")
    start = state.length - 1
    after = decode.settle(program, params, state, draft)
    width = draft.tokens.shape[1] + 1
    index = start[:, None] + jnp.arange(width + 1, dtype=jnp.int32)[None]
    window = jnp.take_along_axis(after.tokens, jnp.minimum(index, after.tokens.shape[1] - 1), 1)
    out = program.model.forward(params, window[:, :-1], cache, start)
    logits = program.model.logits(params, out.hidden)[..., : program.model.vocab_size]
    log_p = sampling.log_probs(logits, state.sampling)
    real = index[:, 1:] < after.length[:, None]
    return after, out.cache, _transform(log_p, _draft_laws(draft, log_p), window[:, 1:], noise), real


def _draft_laws(draft: Draft, log_p: Float[Array, "B S V"]) -> Float[Array, "B S V"]:
    """The draft's law for each row of p; uniform for the further token, and point masses where q is one."""
    one_hot = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None] == draft.tokens[..., None]
    log_q = jnp.where(one_hot, 0.0, -1e9) if draft.log_q is None else jnp.maximum(draft.log_q, -1e9)
    return jnp.concatenate([log_q, jnp.zeros_like(log_p[:, :1])], 1)


def _transform(
    log_p: Float[Array, "B S V"], log_q: Float[Array, "B S V"], tokens: Int[Array, "B S"], noise: Key[Array, ""]
) -> Float[Array, "B S"]:
    score = jnp.where(log_p > -jnp.inf, log_q - jnp.maximum(log_p, -1e9), -jnp.inf)
    p, ids = jnp.exp(log_p), jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None]
    mine = jnp.take_along_axis(score, tokens[..., None], -1)
    below = (score < mine) | ((score == mine) & (ids < tokens[..., None]))
    mass = jnp.take_along_axis(p, tokens[..., None], -1)[..., 0]
    # a token of probability 0 has no place in the order: it counts as the largest
    value = jnp.sum(jnp.where(below, p, 0), -1) + jax.random.uniform(noise, mass.shape) * mass
    return jnp.where(mass > 0, jnp.clip(value, 0, 1 - 1e-7), 1 - 1e-7)


def transform_tests(values: np.ndarray) -> list[Result]:
    """Uniformity of all values, and of neighbouring pairs jointly."""
    flat = values[np.isfinite(values)]
    counts = np.histogram(flat, BINS, (0, 1))[0].astype(float)
    results = [Result("transform", "all tokens of rounds", *statistics.g_test(counts, np.full(BINS, 1 / BINS)))]
    for part, name in ((values[:, 1:5], "tokens 1 to 4"), (values[:, 5:], "later tokens")):
        some = np.histogram(part[np.isfinite(part)], BINS, (0, 1))[0].astype(float)
        if some.sum() > 0:
            results.append(Result("transform", name, *statistics.g_test(some, np.full(BINS, 1 / BINS))))
    left, right = values[:, 1:-1].ravel(), values[:, 2:].ravel()
    both = np.isfinite(left) & np.isfinite(right)
    table = np.histogram2d(left[both], right[both], PAIR_BINS, ((0, 1), (0, 1)))[0]
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / max(table.sum(), 1)
    statistic = float(np.sum((table - expected) ** 2 / np.maximum(expected, 1e-9)))
    degrees = (PAIR_BINS - 1) ** 2
    results.append(Result("dependence", "neighbouring tokens", statistic, degrees, float(chi2.sf(statistic, degrees))))
    return results


def two_sample_test(one: np.ndarray, other: np.ndarray, prompts: Sequence[Sequence[int]], seed: int) -> Result:
    """Maximum mean discrepancy under the Hamming kernel, prompt by prompt, with permutations inside prompts.

    Gao et al. 2024 (Model Equality Testing, arXiv 2410.20247, section 3).
    """
    generator = np.random.default_rng(seed)
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(row)
    observed, permuted = 0.0, np.zeros(PERMUTATIONS)
    for rows in groups.values():
        texts = np.concatenate([one[rows], other[rows]])
        kernel = (texts[:, None] == texts[None]).mean(-1)
        np.fill_diagonal(kernel, 0)
        sign = np.repeat([1.0, -1.0], len(rows))
        signs = generator.permuted(np.tile(sign, (PERMUTATIONS, 1)), axis=1)
        observed += float(sign @ kernel @ sign)
        permuted += np.einsum("ri,ij,rj->r", signs, kernel, signs)
    p_value = (1 + int(np.sum(permuted >= observed - 1e-12))) / (1 + PERMUTATIONS)
    return Result("two-sample", "continuations against plain decoding", observed, 0, p_value)
