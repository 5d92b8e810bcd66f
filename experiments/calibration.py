"""Does the exactness lab keep its promises? Error rates of its tests over many seeds.

    python -m specjax.experiments.calibration --output experiments/calibration

Right rule: each test's false-alarm rate must lie in the 99 % binomial interval of its nominal level (the
sequential test promises at most its level). Planted deviation: a target whose table differs by exactly
the total variation that the report calls detectable must be rejected in at least 99 % of the seeds.
`--mutants` adds the mutation table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

from specjax import decode
from specjax.exactness import lab, mutation, sampler, statistics
from specjax.exactness.oracle import Joint
from specjax.exactness.sampler import Setting
from specjax.exactness.statistics import EProcess
from specjax.exactness.subjects import Subject, instances

LEVEL = 0.05
SETTINGS = (Setting(1.0), Setting(0.7, top_p=0.8))
Say = Callable[[str], None]


def false_alarms(seeds: int, samples: int, say: Say = lambda text: None) -> dict[str, Any]:
    """How often each test rejects the right rule at `LEVEL`."""
    subject, drafter = instances(3)[0]
    program = decode.Program(subject.model, drafter)
    length = lab.Experiment(program, subject).length
    joints = lab.joint_laws(subject, SETTINGS, length)
    alarms = dict.fromkeys(lab.SHARES, 0)
    for seed in range(seeds):
        tally = _sample(program, subject, SETTINGS, length, samples, 10_000 + seed)
        results = []
        for index, joint in enumerate(joints):
            bet = EProcess(np.append(joint.cells, 0.0))
            bet.update(tally.cells[index])
            results += lab.case_results(str(SETTINGS[index]), tally, index, joint, bet)
        for test in alarms:
            family = [result.p_value for result in results if result.test == test]
            alarms[test] += min(statistics.holm(family, [1.0] * len(family))) <= LEVEL
        if seed % 50 == 49:
            say(f"right rule: {seed + 1} of {seeds} seeds, {alarms}")
    low, high = (int(binom.ppf(q, seeds, LEVEL)) for q in (0.005, 0.995))
    return {
        test: {
            "alarms": count, "seeds": seeds, "rate": count / seeds, "level": LEVEL, "interval": [low, high],
            "holds": bool(count <= high and (count >= low or test == "sequential")),
        }
        for test, count in alarms.items()
    }  # fmt: skip


def detections(seeds: int, samples: int, say: Say = lambda text: None) -> dict[str, Any]:
    """How often the joint test, at the level that `check` gives it, rejects a deviation of the detectable size."""
    subject, drafter = instances(3)[0]
    program = decode.Program(subject.model, drafter)
    length = lab.Experiment(program, subject).length
    joint = lab.joint_laws(subject, SETTINGS[:1], length)[0]
    level = lab.ALPHA * lab.SHARES["joint"]
    counted = int((sampler.make_cases(subject, SETTINGS, length, samples).case == 0).sum())
    size = statistics.detectable(counted, joint.cells, level)
    planted = _planted(subject, joint, length, size, counted)
    caught = 0
    for seed in range(seeds):
        tally = _sample(program, planted, SETTINGS, length, samples, 20_000 + seed)
        caught += statistics.joint_test(tally.cells[0][:-1], joint, "").p_value <= level
        if seed % 50 == 49:
            say(f"planted deviation of {size:.4f}: {caught} of {seed + 1} seeds caught")
    worst = _worst_case(joint, size, counted, level, seeds=20 * seeds)
    return {
        "total_variation": size, "samples": counted, "level": level, "caught": caught, "seeds": seeds,
        "rate": caught / seeds, "worst_direction_rate": worst, "holds": caught >= 0.99 * seeds,
    }  # fmt: skip


def _sample(
    program: decode.Program, subject: Subject, settings: tuple[Setting, ...], length: int, samples: int, seed: int
) -> sampler.Tally:
    params = program.drafter.params(jax.random.key(0), subject.model, subject.params)
    *_, tally = sampler.sample(
        program, subject, params, settings, new_tokens=length, samples=samples, seed=seed, batch=samples
    )
    return tally


def _planted(subject: Subject, joint: Joint, length: int, size: float, samples: int) -> Subject:
    """The subject with every logit moved by +c or -c, so that the pooled joint law moves by `size`."""
    labels = statistics.pools(joint.cells * samples)
    sign = np.random.default_rng(0).choice([-1.0, 1.0], subject.params["table"].shape)

    def moved(c: float) -> Subject:
        table = subject.params["table"] + jnp.asarray(c * sign, jnp.float32)
        return dataclasses.replace(subject, params={"table": table})

    def excess(c: float) -> float:
        law = lab.joint_laws(moved(c), SETTINGS[:1], length)[0].cells
        moves = np.bincount(labels[labels >= 0], (law - joint.cells)[labels >= 0])
        return 0.5 * float(np.abs(moves).sum()) - size

    return moved(float(brentq(excess, 0.0, 1.0, xtol=1e-5)))


def _worst_case(joint: Joint, size: float, samples: int, level: float, seeds: int) -> float:
    """Rejections of the deviation that is hardest to see: in proportion to p, up in one half of the mass."""
    generator, law = np.random.default_rng(1), joint.cells
    labels = statistics.pools(law * samples)  # the promise is about pooled cells: a pool moves as one
    mass = np.bincount(labels[labels >= 0], law[labels >= 0])
    order = generator.permutation(len(mass))
    half = np.empty(len(mass), bool)
    half[order] = np.cumsum(mass[order]) < 0.5
    up = half[labels]
    sign = np.where(up, 0.5 / law[up].sum(), -0.5 / law[~up].sum())
    moved = law * (1 + 2 * size * sign)
    draws = generator.multinomial(samples, moved / moved.sum(), size=seeds)
    return float(np.mean([statistics.g_test(counts.astype(float), law)[2] <= level for counts in draws]))


def markdown(found: dict[str, Any]) -> str:
    """The tables that are committed."""
    lines = [f"Right rule, {LEVEL:g} level each, {next(iter(found['false_alarms'].values()))['seeds']} seeds:", ""]
    lines += ["| test | alarms | 99 % interval | holds |", "|---|---|---|---|"]
    for test, row in found["false_alarms"].items():
        span = (
            f"{row['interval'][0]} to {row['interval'][1]}" if test != "sequential" else f"at most {row['interval'][1]}"
        )
        lines.append(f"| {test} | {row['alarms']} ({row['rate']:.3f}) | {span} | {'yes' if row['holds'] else 'NO'} |")
    hit = found["detections"]
    if "caught" in hit:
        lines += ["", f"Planted deviation of that size: caught in {hit['caught']} of {hit['seeds']} seeds."]
    lines += [
        "",
        f"Hardest direction, total variation {hit['total_variation']:.4f} of the pooled law, the detectable size at "
        f"{hit['samples']:,} sequences and level {hit['level']:g}: {hit['worst_direction_rate']:.1%} caught.",
    ]
    if "mutants" in found:
        lines += ["", "| mutant | what it computes | sequences | TV seen | accepted | killed by | p |"]
        lines.append("|---|---|---|---|---|---|---|")
        for row in found["mutants"]:
            killers = ", ".join(row["killed_by"]) or "none"
            lines.append(
                f"| {row['name']} | {row['fault']} | {row['samples']:,} | {row['total_variation']:.3f} "
                f"| {row['accepted_per_round']:.2f} | {killers} | {row['p_value']:.1g} |"
            )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Run the study and write `OUTPUT.json` and `OUTPUT.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=400, help="of the right rule; half as many of the deviation")
    parser.add_argument("--samples", type=int, default=1 << 13, help="sequences a seed")
    parser.add_argument("--mutants", type=int, default=0, metavar="N", help="sequences a mutant; 0 leaves them out")
    parser.add_argument("--output", type=Path, default=Path("experiments/calibration"))
    args = parser.parse_args(arguments)
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:6.0f} s  {text}", flush=True)

    found: dict[str, Any] = {
        "false_alarms": false_alarms(args.seeds, args.samples, say),
        "detections": detections(args.seeds // 2, args.samples, say),
    }
    if args.mutants:
        rows = [*mutation.panel(samples=args.mutants, progress=say), *mutation.liars(samples=args.mutants)]
        rows += mutation.others(samples=args.mutants)
        found["mutants"] = [dataclasses.asdict(row) for row in rows]
    args.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
