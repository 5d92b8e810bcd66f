"""Vocabularies whose laws can't be enumerated: every token's transform, and whole texts against plain decoding."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax import decode, verify
from specjax.drafter import Drafter
from specjax.engine import Engine
from specjax.exactness import compatibility, identity, lab, statistics, transform
from specjax.exactness.experiment import Setting
from specjax.exactness.report import Case, Coverage, Report
from specjax.exactness.statistics import TestResult
from specjax.language_model import LanguageModel, load_target

SETTING = Setting(0.8, top_p=0.95)
SEQUENCES, NEW_TOKENS, BATCH, PERMUTATIONS = 48, 24, 16, 9999
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
    progress: lab.Progress = lab.silent,
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
    got = collect(engine, texts, seed, progress)
    plain = collect(Engine(target), texts, seed + 1, progress, transformed=False)

    lengths = [len(prompt) for prompt in ids]
    gate, identities = identity.check_rule(program.rule)
    results = lab.adjust(
        [*transform.transform_tests(got.values), two_sample_test(got.tokens, plain.tokens, texts.prompts, seed)], SHARES
    )
    bins, values = transform.BINS, got.values
    seen, uniform = values[np.isfinite(values)], np.full(bins, 1 / bins)
    level = alpha * SHARES["transform"] / sum(r.test == "transform" for r in results)
    detectable = statistics.detectable(seen.size, uniform, level)
    counts = np.append(np.histogram(seen, bins, (0, 1))[0], 0).astype(float)
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
        results=(*results, *identities, *identity.replay_results(got.replay)),
        gate=gate,
        cases=(Case("probability-integral transform", uniform, counts, detectable, 0.0),),
        seconds=time.perf_counter() - began,
        method=f"probability-integral transform of {seen.size:,} tokens under the target's own law, "
        "against plain decoding",
        coverage=(
            Coverage(
                "batches under one setting", batch, (min(lengths) + new_tokens, max(lengths) + new_tokens),
                (str(setting),), tuple(map(int, got.drafted)), len(texts.prompts), detectable,
            ),
        ),
    )  # fmt: skip


def sequences(asked: int) -> int:
    """How many `check_large` decodes: whole batches, once with drafts and once without."""
    return 2 * -(-asked // BATCH) * BATCH


@dataclass(frozen=True)
class Collected:
    """Of decoded texts: transformed values (NaN where no round emitted) and tokens, both [sequences, new_tokens]."""

    values: np.ndarray
    tokens: np.ndarray
    drafted: np.ndarray  # rounds, by the number of drafts that they had to verify
    replay: list[np.ndarray]  # `sampler.compare_drafts`, a row a batch


def collect(
    engine: Engine, texts: Texts, seed: int, progress: lab.Progress = lab.silent, transformed: bool = True
) -> Collected:
    """Decode the texts batch by batch, and their tokens' transform if it is asked for."""
    program, params, own = engine.program, engine.params, engine.drafter_params
    prompts, batch, new_tokens, setting = texts.prompts, texts.batch, texts.new_tokens, texts.setting
    capacity = max(map(len, prompts)) + new_tokens + program.drafter.num_speculative_tokens
    values, found, rounds, replays = [np.zeros((0, new_tokens))], [], [], []
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        state = engine.start(
            rows, max_new_tokens=new_tokens, seed=seed, rows=range(first, first + batch), end_ids=(), capacity=capacity,
            temperature=setting.temperature, top_k=setting.top_k, top_p=setting.top_p, min_p=setting.min_p,
        )  # fmt: skip
        replay: Sequence[Array] = ()
        if transformed:
            noise = jax.random.fold_in(jax.random.key(seed), 1 << 20 | first)
            seen, state, replay = transform.observe(program, params, own, state, new_tokens, noise)
            values.append(seen)
        else:
            state = decode.run(program, params, own, state)
        window = (state.limit - new_tokens)[:, None] + jnp.arange(new_tokens, dtype=jnp.int32)[None]
        found.append(np.asarray(jnp.take_along_axis(state.tokens, window, 1)))
        rounds.append(np.asarray(state.counts.drafted)[np.asarray(state.counts.emitted) > 0])
        replays.append([np.asarray(part).sum(0, keepdims=True) for part in replay])
        progress(f"{program.drafter}", batch)
    return Collected(
        np.concatenate(values), np.concatenate(found), np.bincount(np.concatenate(rounds), minlength=1),
        [np.concatenate(parts) for parts in zip(*replays, strict=True)],
    )  # fmt: skip


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
