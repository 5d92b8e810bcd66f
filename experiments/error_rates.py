"""False alarms and detections of the exactness lab over many seeds of the real loop: what `calibration` counts.

Right rule: each test's family, corrected by Holm's method, is rejected at `LEVEL`. Planted deviation: a target
whose table differs by exactly the total variation that a report calls detectable.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq

from specjax import decode, testing
from specjax.engine import Engine
from specjax.exactness import lab, large, sampler, statistics, transform
from specjax.exactness.experiment import Setting, make_cases
from specjax.exactness.statistics import TestResult
from specjax.exactness.subjects import Laws, Subject, dirichlet_laws, instances, table
from specjax.language_model import LanguageModel

LEVEL = 0.05
SAMPLES, BATCH = 1 << 14, 1 << 11
SETTINGS = (Setting(1.0, weight=3), Setting(0.7, top_p=0.8), Setting(1.0, top_k=2), Setting(1.0, min_p=0.1))


def false_alarms(seeds: Sequence[int], samples: int = SAMPLES) -> dict[str, int]:
    """Seeds of the right rule that each test rejects; the sequential one is watched after every batch."""
    experiment, alarms = _experiment(), dict.fromkeys(lab.SHARES, 0)
    for seed in seeds:
        _count(alarms, lab.gather(experiment, samples, 10_000 + seed, batch=BATCH).results())
    return alarms


def transform_alarms(seeds: Sequence[int], sequences: int = 64, new_tokens: int = 24) -> dict[str, int]:
    """The same for the tests of large vocabularies, on a tiny Llama that drafts with its first layer."""
    model, params = testing.tiny_model(vocab_size=97, sharpness=1.5)
    target = LanguageModel.of(model, jax.tree.map(jnp.asarray, params))
    prompts = [([1, 2, 3], [4, 5], [6, 7, 8, 9], [10])[i % 4] for i in range(sequences)]
    texts = large.Texts(prompts, Setting(0.8, top_p=0.95), new_tokens, sequences)
    engine, plain = Engine(target, "early-exit:exit_layer=1"), Engine(target)
    alarms = dict.fromkeys(large.SHARES, 0)
    for seed in seeds:
        found = large.collect(engine, texts, 2 * seed)
        others = large.collect(plain, texts, 2 * seed + 1, transformed=False)
        results = [
            *transform.transform_tests(found.values),
            large.two_sample_test(found.tokens, others.tokens, prompts, seed),
        ]
        _count(alarms, results)
    return alarms


def _count(alarms: dict[str, int], results: Sequence[TestResult]) -> None:
    for test in alarms:
        family = [result.p_value for result in results if result.test == test]
        alarms[test] += int(min(statistics.holm(family, [1.0] * len(family))) <= LEVEL)


def detections(seeds: Sequence[int], samples: int = SAMPLES) -> dict[str, Any]:
    """How often the joint test, at the level that `check` gives it, rejects a deviation of the detectable size."""
    experiment = _experiment(SETTINGS[:1])
    joint, level = experiment.joints[0], lab.ALPHA * lab.SHARES["joint"]
    mixed = _experiment()
    counted = int((make_cases(mixed, BATCH).case == 0).sum()) * samples // BATCH
    size = statistics.detectable(counted, joint.cells, level)
    planted, caught = replace(mixed, subject=_planted(experiment, size, counted)), 0
    for seed in seeds:
        *_, tally = sampler.sample(planted, samples, 10_000 + seed, batch=BATCH)
        caught += int(statistics.joint_test(np.asarray(tally.cells)[0][:-1], joint, "").p_value <= level)
    return {"total_variation": size, "samples": counted, "level": level, "caught": caught}


def hardest_direction(draws: int, samples: int) -> dict[str, Any]:
    """The same for the deviation that is hardest to see: in proportion to p, up in one half of the mass.

    The promise is about pooled cells, so a pool moves as one. Multinomial draws: many are needed.
    """
    joint, level = _experiment(SETTINGS[:1]).joints[0], lab.ALPHA * lab.SHARES["joint"]
    size = statistics.detectable(samples, joint.cells, level)
    generator, law = np.random.default_rng(1), joint.cells
    labels = statistics.pools(law * samples)
    mass = np.bincount(labels[labels >= 0], law[labels >= 0])
    order = generator.permutation(len(mass))
    half = np.empty(len(mass), bool)
    half[order] = np.cumsum(mass[order]) < 0.5
    up = half[labels]
    moved = law * (1 + 2 * size * np.where(up, 0.5 / law[up].sum(), -0.5 / law[~up].sum()))
    found = generator.multinomial(samples, moved / moved.sum(), size=draws)
    caught = sum(statistics.g_test(counts.astype(float), law)[2] <= level for counts in found)
    return {"total_variation": size, "samples": samples, "level": level, "caught": caught, "draws": draws}


def accepted_in_theory(target: Laws, draft: Laws, drafts: int) -> dict[str, float]:
    """Mean number of accepted drafts, by enumeration of every draft.

    `token`: sum of E prod min(1, p / q) (Leviathan et al. 2023, section 3.1); `match`: sum of E prod p; `block`:
    sum of E of the clipped prefix weight (Sun et al. 2024, arXiv 2403.10444, section 4).
    """
    totals = dict.fromkeys(("token", "match", "block"), 0.0)
    for path in itertools.product(range(len(target[()])), repeat=drafts):
        p, q = (np.array([laws[path[:i]][path[i]] for i in range(drafts)]) for laws in (target, draft))
        weights = list(itertools.accumulate(p / q, lambda weight, ratio: min(weight * ratio, 1.0), initial=1.0))[1:]
        kept = {"token": np.cumprod(np.minimum(1, p / q)), "match": np.cumprod(p), "block": np.array(weights)}
        for name, chances in kept.items():
            totals[name] += float(q.prod() * chances.sum())
    return totals


def _experiment(settings: Sequence[Setting] = SETTINGS) -> lab.Experiment:
    """The chosen instance."""
    subject, right = instances(3)[0]
    return lab.Experiment(decode.Program(subject.model, right), subject, settings)


def _planted(experiment: lab.Experiment, size: float, samples: int) -> Subject:
    """The subject with every logit moved by +c or -c, so that the pooled joint law moves by `size`.

    The chosen instance's laws are moved, not its table: contexts that differ before the marker stay equal.
    """
    joint = experiment.joints[0]
    labels = statistics.pools(joint.cells * samples)
    laws, generator = dirichlet_laws(3, 4, seed=7)[0], np.random.default_rng(0)
    signs = {context: generator.choice([-1.0, 1.0], 3) for context in laws}

    def moved(c: float) -> Subject:
        weights = {context: law * np.exp(c * signs[context]) for context, law in laws.items()}
        moved = {context: weight / weight.sum() for context, weight in weights.items()}
        return replace(experiment.subject, params=table(3, 4, moved))

    def excess(c: float) -> float:
        law = replace(experiment, subject=moved(c)).joints[0].cells
        moves = np.bincount(labels[labels >= 0], (law - joint.cells)[labels >= 0])
        return 0.5 * float(np.abs(moves).sum()) - size

    return moved(float(brentq(excess, 0.0, 1.0, xtol=1e-5)))
