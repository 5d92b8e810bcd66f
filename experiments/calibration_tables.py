"""The tables of `calibration`, computed from the raw results of its jobs."""

from __future__ import annotations

from typing import Any

from scipy.stats import binom
from specjax.experiments import error_rates

from specjax.exactness import lab
from specjax.exactness.subjects import dirichlet_laws


def markdown(done: dict[str, Any]) -> str:
    """All tables whose jobs have begun."""
    parts = [false_alarms(done), detections(done), efficiency(done), drafters(done), mutants(done)]
    return "\n\n".join(part for part in parts if part) + "\n"


def rates(done: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """False alarms of each test over all seeds, with the 99 % binomial interval of the nominal level."""
    found: dict[str, dict[str, Any]] = {}
    for name, alarms in done.items():
        kind, _, seeds = name.partition(": seeds ")
        if kind not in ("right rule", "large vocabulary"):
            continue
        first, last = map(int, seeds.split(" to "))
        for test, count in alarms.items():
            row = found.setdefault(test, {"alarms": 0, "seeds": 0})
            row["alarms"] += count
            row["seeds"] += last - first + 1
    for test, row in found.items():
        low, high = (int(binom.ppf(q, row["seeds"], error_rates.LEVEL)) for q in (0.005, 0.995))
        row["interval"] = (0 if test == "sequential" else low, high)  # a bet promises at most its level
        row["holds"] = row["interval"][0] <= row["alarms"] <= high
    return found


def false_alarms(done: dict[str, Any]) -> str:
    """Of the right rule."""
    found = rates(done)
    if not found:
        return ""
    lines = [f"**False alarms** of the right rule at a level of {error_rates.LEVEL:g} each:", ""]
    lines += ["| test | seeds | alarms | 99 % interval | holds |", "|---|---|---|---|---|"]
    for test, row in found.items():
        span = "at most {1}" if test == "sequential" else "{0} to {1}"
        alarms = f"{row['alarms']} ({row['alarms'] / row['seeds']:.3f})"
        holds = "yes" if row["holds"] else "NO"
        lines.append(f"| {test} | {row['seeds']} | {alarms} | {span.format(*row['interval'])} | {holds} |")
    return "\n".join(lines)


def detections(done: dict[str, Any]) -> str:
    """Of deviations of the size that a report calls detectable."""
    parts = {name.partition(": seeds ")[2]: found for name, found in done.items() if name.startswith("planted")}
    lines = []
    if parts:
        spans = [tuple(map(int, seeds.split(" to "))) for seeds in parts]
        total = sum(last - first + 1 for first, last in spans)
        one, caught = next(iter(parts.values())), sum(found["caught"] for found in parts.values())
        lines.append(
            f"**Power.** A target that deviates by the detectable size (total variation {one['total_variation']:.4f} "
            f"at {one['samples']:,} sequences and level {one['level']:g}) was caught in {caught} of {total} seeds "
            "of the whole loop."
        )
    hard = done.get("hardest direction")
    if hard:
        lines.append(
            f"The hardest direction of that size ({hard['total_variation']:.4f} at {hard['samples']:,} sequences) was "
            f"caught in {hard['caught']:,} of {hard['draws']:,} multinomial draws."
        )
    return " ".join(lines)


def efficiency(done: dict[str, Any]) -> str:
    """Accepted drafts of the exact rules against their closed forms."""
    rows = [row for name, part in done.items() if name.startswith("mutants: token") for row in part[:4]]
    if not rows:
        return ""
    theory = error_rates.accepted_in_theory(*dirichlet_laws(3, 4, seed=7), drafts=3)
    lines = ["**Efficiency**: drafts accepted in a round, V = 3, K = 3, seed 7, temperature 1:", ""]
    lines += ["| rule | measured | closed form | standard errors apart |", "|---|---|---|---|"]
    for row in rows:
        expected = theory.get(row["name"], theory["block"])  # hierarchical verification is the block rule
        apart = (row["accepted_per_round"] - expected) / row["accepted_error"]
        lines.append(f"| {row['name']} | {row['accepted_per_round']:.4f} | {expected:.4f} | {apart:+.1f} |")
    return "\n".join(lines)


def drafters(done: dict[str, Any]) -> str:
    """Every drafter of the project."""
    lines = [
        "**Drafters** on a tiny Llama, settings of all kinds and ragged prompts mixed in every batch:", "",
        "| drafter | verdict | sequences | TV caught | tests | smallest p | corrected | drafts accepted, at most |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in done.items():
        if name.startswith("drafter: "):
            lines.append(
                f"| {name.removeprefix('drafter: ')} | {row['verdict']} | {row['samples']:,} | {row['detectable']:.3f} "
                f"| {row['tests']} | {row['p_value']:.1g} | {row['adjusted']:.2g} ({row['test']}) "
                f"| {row['accepted']:.2f} |"
            )
    return "\n".join(lines) if len(lines) > 4 else ""


def mutants(done: dict[str, Any]) -> str:
    """What kills each mutant; controls must live."""
    rows = [row for name, part in done.items() if name.startswith("mutants: ") for row in part]
    if not rows:
        return ""
    lines = [
        "**Mutants** under the default instances and settings, level 0.001 each; the first four are right:", "",
        "| mutant | what it computes | sequences | TV seen (noise included) | accepted | killed by, p |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['fault']} | {row['samples']:,} | {row['total_variation']:.3f} "
            f"| {row['accepted_per_round']:.2f} | {_killers(row)} |"
        )
    return "\n".join(lines)


def _killers(row: dict[str, Any]) -> str:
    """Tests that reject, with their p; `identity` and `replay` are no statistics, they know or don't."""
    found = {test: p_value for test, p_value in row["p_values"].items() if p_value <= lab.ALPHA}
    known = ("identity", "replay")
    return ", ".join(test if test in known else f"{test} {_p(p)}" for test, p in found.items()) or "none"


def _p(p_value: float) -> str:
    return f"{p_value:.0e}" if p_value > 0 else "<1e-300"  # below the smallest float64


BEGIN, END = "<!-- calibration: written by experiments/calibration.py -->", "<!-- end of calibration -->"


def into_readme(text: str, done: dict[str, Any]) -> str:
    """The README with the tables between its two marks made anew."""
    before, _, rest = text.partition(BEGIN)
    parts = [false_alarms(done), detections(done), efficiency(done), compact(done)]
    body = "\n\n".join(part for part in parts if part)
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{rest.partition(END)[2]}"


def compact(done: dict[str, Any]) -> str:
    """Each mutant with the test that rejects it with the smallest p, for the README."""
    rows = [row for name, part in done.items() if name.startswith("mutants: ") for row in part]
    cells = [f"{row['name']} | {_first(row)}" for row in rows if _killers(row) != "none"]
    if not cells:
        return ""
    half = -(-len(cells) // 2)
    pairs = zip(cells[:half], [*cells[half:], " | "][:half], strict=True)
    lines = [
        f"**Mutants** that the lab rejects at its default instances, settings and level: {len(cells)}. The sharpest"
    ]
    lines += ["test's p stands beside its name; `identity` and `replay` know without sampling.", ""]
    lines += ["| mutant | killed by | mutant | killed by |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {left} | {right} |" for left, right in pairs)])


def _first(row: dict[str, Any]) -> str:
    test = min(row["p_values"], key=lambda test: (row["p_values"][test], test in ("identity", "replay")))
    return test if test in ("identity", "replay") else f"{test} {_p(row['p_values'][test])}"
