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
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from scipy.stats import chi2

from specjax import decode, sampling, verify
from specjax.drafter import Drafter
from specjax.engine import Engine
from specjax.exactness import compatibility, identity, lab, statistics
from specjax.exactness.experiment import Setting
from specjax.exactness.report import Case, Report
from specjax.exactness.statistics import TestResult
from specjax.language_model import LanguageModel, load_target
from specjax.types import Model, Params, Sampling

Progress = Callable[[str], None]
SETTING = Setting(0.8, top_p=0.95)
SEQUENCES, NEW_TOKENS, BATCH, BINS, PAIR_BINS, PERMUTATIONS = 48, 24, 16, 16, 5, 9999
DETECT = 0.125
SHARES = {"transform": 0.5, "dependence": 0.25, "two-sample": 0.25}
PROMPTS = (
    "The capital of France is", "Once upon a time there was a", "To make a good soup you need",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return", "The three primary colours are",
    "My favourite season is", "Water boils at", "She opened the old box and found",
)  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """What is decoded: prompts, all under one setting, in batches."""

    prompts: Sequence[Sequence[int]]
    setting: Setting = SETTING
    new_tokens: int = NEW_TOKENS
    batch: int = BATCH


def check_large(
    drafter: Drafter | str,
    target: LanguageModel | str = "smollm2-135m",
    *,
    rule: verify.Rule | None = None,
    prompts: Sequence[str | Sequence[int]] = PROMPTS,
    setting: Setting = SETTING,
    sequences: int = SEQUENCES,
    new_tokens: int = NEW_TOKENS,
    batch: int = BATCH,
    alpha: float = lab.ALPHA,
    detect: float = DETECT,
    seed: int = 0,
    progress: Progress = lambda text: None,
) -> Report:
    """Test a drafter and a rule on a target of any vocabulary.

    Args:
      target: loaded, or what `specjax.load_target` finds.
      prompts: text (read without a chat template) or token ids, taken in turn.
      detect: total variation of the transform's law from uniform that must be caught with 99 % probability.

    Raises:
      ValueError: a tree of drafts, or options out of range.
    """
    began = time.perf_counter()
    if not 0 < alpha < 1 or not 0 < detect < 1 or sequences < 1:
        given = f"alpha={alpha}, detect={detect}, sequences={sequences}"
        raise ValueError(f"{given}: two levels in (0, 1), at least one text")
    target = load_target(target, dtype="float32") if isinstance(target, str) else target
    engine = Engine(target, drafter, rule=rule or verify.Token())
    program = engine.program
    ids = [target.encode(prompt, raw=True) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    texts = Texts([ids[i % len(ids)] for i in range(-(-sequences // batch) * batch)], setting, new_tokens, batch)
    values, found = collect(engine, texts, seed, progress)
    _, plain = collect(Engine(target), texts, seed + 1, progress, transform=False)

    gate, identities = identity.check_rule(program.rule)
    results = lab.adjust([*transform_tests(values), two_sample_test(found, plain, texts.prompts, seed)], SHARES)
    seen, uniform = values[np.isfinite(values)], np.full(BINS, 1 / BINS)
    level = alpha * SHARES["transform"] / sum(r.test == "transform" for r in results)
    detectable = statistics.detectable(seen.size, uniform, level)
    counts = np.append(np.histogram(seen, BINS, (0, 1))[0], 0).astype(float)
    needed = statistics.samples_needed(detect, uniform, level) * len(texts.prompts)
    return Report(
        subject=target.name,
        drafter=str(program.drafter),
        rule=str(program.rule),
        proven=program.exact,
        approximate=compatibility.is_approximate(program.rule),
        settings=(str(setting),),
        samples=len(texts.prompts),
        tokens=new_tokens,
        alpha=alpha,
        detect=detect,
        detectable=detectable,
        needed=math.ceil(needed / max(seen.size, 1)),
        results=(*results, *identities),
        gate=gate,
        cases=(Case("probability-integral transform", uniform, counts, detectable, 0.0),),
        seconds=time.perf_counter() - began,
        method=f"probability-integral transform of {seen.size:,} tokens under the target's own law, "
        "against plain decoding",
    )


def collect(
    engine: Engine, texts: Texts, seed: int, progress: Progress = lambda text: None, transform: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Transformed values [sequences, new_tokens] (NaN where no round emitted) and the tokens themselves."""
    program, params, own = engine.program, engine.params, engine.drafter_params
    prompts, batch, new_tokens, setting = texts.prompts, texts.batch, texts.new_tokens, texts.setting
    capacity = max(map(len, prompts)) + new_tokens + program.drafter.num_speculative_tokens
    values, found = [np.zeros((0, new_tokens))], []
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        state = engine.start(
            rows, max_new_tokens=new_tokens, seed=seed, rows=range(first, first + batch), end_ids=(), capacity=capacity,
            temperature=setting.temperature, top_k=setting.top_k, top_p=setting.top_p, min_p=setting.min_p,
        )  # fmt: skip
        first_new = state.limit - new_tokens
        window = first_new[:, None] + jnp.arange(new_tokens, dtype=jnp.int32)[None]
        if transform:
            state, drafted = _watch(program, params, own, state, first_new, new_tokens)
            noise = jax.random.fold_in(jax.random.key(seed), 1 << 20 | first)
            seen = _transform(program.model, params, state.tokens, window, drafted, state.sampling, noise)
            values.append(np.array(seen, np.float64))
            values[-1][:, 0] = np.nan  # emitted by the prompt's own pass
        else:
            state = decode.run(program, params, own, state)
        found.append(np.asarray(jnp.take_along_axis(state.tokens, window, 1)))
        progress(f"{program.drafter}: {first + batch} of {len(prompts)} sequences")
    return np.concatenate(values), np.concatenate(found)


@functools.partial(jax.jit, static_argnames=("program", "new_tokens"))
def _watch(
    program: decode.Program, params: Params, own: Params, state: decode.State, first: Int[Array, "B"], new_tokens: int
) -> tuple[decode.State, Array]:
    """Decode to the end, and note what was drafted for each new token.

    Returns:
      the last state, and for each token the law of its draft [B, N, V], zeros where it had none; for point
      masses their ids [B, N], -1 where there was none.
    """
    outline = jax.eval_shape(functools.partial(decode.propose, program, params, own), state)
    if outline.parents is not None:
        raise ValueError(f"drafter {program.drafter} drafts trees: the transform orders tokens along a chain only")
    rows = jnp.arange(state.tokens.shape[0], dtype=jnp.int32)[:, None]
    steps = jnp.arange(outline.tokens.shape[1], dtype=jnp.int32)[None]
    shape = (len(rows), new_tokens)
    blank = jnp.full(shape, -1, jnp.int32)
    if outline.log_q is not None:
        blank = jnp.zeros((*shape, outline.log_q.shape[-1]), jnp.float32)

    def body(carry: Any) -> Any:
        state, drafted = carry
        draft = decode.propose(program, params, own, state)
        after = decode.verify_and_commit(program, params, own, state, draft)
        emitted = state.length[:, None] + steps < after.length[:, None]
        index = jnp.where(emitted, state.length[:, None] + steps - first[:, None], new_tokens)
        kept = draft.tokens if draft.log_q is None else draft.log_q
        return after, drafted.at[rows, index].set(kept, mode="drop")

    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), body, (state, blank))


@functools.partial(jax.jit, static_argnames=("model",))
def _transform(
    model: Model, params: Params, tokens: Int[Array, "B T"], window: Int[Array, "B N"], drafted: Array,
    sampler: Sampling, noise: Key[Array, ""],
) -> Float[Array, "B N"]:  # fmt: skip
    """The transform of the tokens at `window`, under the target's laws from one pass over the finished text."""
    cache = model.init_cache(tokens.shape[0], tokens.shape[1], jnp.float32)
    hidden = model.forward(params, tokens, cache, jnp.zeros(tokens.shape[:1], jnp.int32)).hidden
    hidden = jnp.take_along_axis(hidden, window[..., None] - 1, 1)
    token = jnp.take_along_axis(tokens, window, 1)
    v = jax.random.uniform(noise, window.shape)
    ids = jnp.arange(model.vocab_size, dtype=jnp.int32)[None]

    def one(column: Any) -> Float[Array, "B"]:
        hidden, token, drafted, v = column
        logits = model.logits(params, hidden[:, None])[..., : model.vocab_size]
        log_p = sampling.log_probs(logits, sampler)[:, 0]
        log_q = drafted if drafted.ndim == 2 else jnp.where(ids == drafted[:, None], 0.0, -1e9)
        score = jnp.where(log_p > -jnp.inf, jnp.maximum(log_q, -1e9) - jnp.maximum(log_p, -1e9), -jnp.inf)
        p, here = jnp.exp(log_p), ids == token[:, None]
        mine, mass = jnp.take_along_axis(score, token[:, None], 1), jnp.sum(jnp.where(here, p, 0), -1)
        below = (score < mine) | ((score == mine) & (ids < token[:, None]))
        # a token of probability 0 has no place in the order: it counts as the largest
        value = jnp.sum(jnp.where(below, p, 0), -1) + v * mass
        return jnp.where(mass > 0, jnp.clip(value, 0, 1 - 1e-7), 1 - 1e-7)

    columns = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), (hidden, token, drafted, v))
    return jnp.swapaxes(jax.lax.map(one, columns), 0, 1)


def transform_tests(values: np.ndarray) -> list[TestResult]:
    """Uniformity of all values, and of neighbouring pairs jointly."""
    results = []
    parts = {"all tokens of rounds": values, "tokens 1 to 4": values[:, 1:5], "later tokens": values[:, 5:]}
    for name, part in parts.items():
        counts = np.histogram(part[np.isfinite(part)], BINS, (0, 1))[0].astype(float)
        if counts.sum() > 0 or part is values:
            results.append(TestResult("transform", name, *statistics.g_test(counts, np.full(BINS, 1 / BINS))))
    left, right = values[:, 1:-1].ravel(), values[:, 2:].ravel()
    both = np.isfinite(left) & np.isfinite(right)
    table = np.histogram2d(left[both], right[both], PAIR_BINS, ((0, 1), (0, 1)))[0]
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / max(table.sum(), 1)
    statistic = float(np.sum((table - expected) ** 2 / np.maximum(expected, 1e-9)))
    degrees = (PAIR_BINS - 1) ** 2
    p_value = float(chi2.sf(statistic, degrees))
    return [*results, TestResult("dependence", "neighbouring tokens", statistic, degrees, p_value)]


def two_sample_test(one: np.ndarray, other: np.ndarray, prompts: Sequence[Sequence[int]], seed: int) -> TestResult:
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
        permuted += ((signs @ kernel) * signs).sum(1)
    p_value = (1 + int(np.sum(permuted >= observed - 1e-12))) / (1 + PERMUTATIONS)
    return TestResult("two-sample", "continuations against plain decoding", observed, 0, p_value)
