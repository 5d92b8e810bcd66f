"""The verdict: what was tested, how sure one can be, and what a failure looks like."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specjax import figures
from specjax.exactness.statistics import POWER, TestResult

PASS, FAIL, INCONCLUSIVE, APPROXIMATE = "PASS", "FAIL", "INCONCLUSIVE", "APPROXIMATE"


@dataclass(frozen=True)
class Case:
    """One context under one sampling setting: observed counts beside the exact law."""

    name: str
    law: np.ndarray
    counts: np.ndarray
    detectable: float  # total variation that the joint test catches with 99 % probability
    accepted_per_round: float


@dataclass(frozen=True)
class Divergence:
    """Distance of an approximate rule from the target, with 95 % intervals."""

    name: str
    tv_per_token: tuple[float, float, float]  # estimate, low, high
    kl_per_token: tuple[float, float, float]  # in nats


@dataclass(frozen=True)
class Deviation:
    """Where a failed test points to."""

    where: str
    tokens: tuple[tuple[int, float, float], ...]  # id, observed frequency, expected probability
    total_variation: float
    looks_like: str


@dataclass(frozen=True)
class Coverage:
    """What one part of the test decoded."""

    condition: str
    rows: int  # of a batch
    texts: tuple[int, int]  # tokens of the shortest and of the longest one, prompt included
    settings: tuple[str, ...]
    drafted: tuple[int, ...]  # rounds, by the number of drafts that they had to verify
    sequences: int
    detectable: float  # total variation caught with 99 % probability in its weakest case

    def __str__(self) -> str:
        counts = [number for number, rounds in enumerate(self.drafted) if rounds]
        rounds = max(sum(self.drafted), 1)
        mean = sum(number * count for number, count in enumerate(self.drafted)) / rounds
        drafts = f"{min(counts, default=0)} to {max(counts, default=0)} drafts a round ({mean:.1f} on average)"
        return (
            f"{self.condition}: {self.sequences:,} sequences, batches of {self.rows}, texts of {self.texts[0]} to "
            f"{self.texts[1]} tokens, {drafts}; TV {self.detectable:.3f} is caught"
        )


@dataclass(frozen=True)
class Report:
    """What `check` found. `str(report)` is the text that a reviewer can quote."""

    subject: str
    drafter: str
    rule: str
    proven: bool  # whether the rule is on the program's list of exact ones
    approximate: bool  # whether it is known to change the law
    settings: tuple[str, ...]
    samples: int
    tokens: int
    alpha: float
    detect: float
    detectable: float
    needed: int  # sequences that would reach `detect`
    results: tuple[TestResult, ...]
    gate: dict[str, float] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    divergences: tuple[Divergence, ...] = ()
    seconds: float = 0.0
    method: str = "joint law by enumeration"
    coverage: tuple[Coverage, ...] = ()

    @property
    def verdict(self) -> str:
        """PASS only with the power that was asked for, and of something that was drafted."""
        if self.approximate:
            return APPROXIMATE
        if self.killers():
            return FAIL
        return PASS if self.drafted and self.detectable <= self.detect else INCONCLUSIVE

    @property
    def drafted(self) -> bool:
        """Whether any round had a draft to verify."""
        return any(sum(part.drafted[1:]) for part in self.coverage)

    @property
    def passed(self) -> bool:
        """Nothing found, with the power that was asked for."""
        return self.verdict == PASS

    def strongest(self, test: str = "") -> TestResult:
        """The result with the smallest p-value, of all or of one test."""
        some = (result for result in self.results if test in ("", result.test))
        return min(some, key=lambda result: (result.adjusted, result.p_value))

    def killers(self) -> list[str]:
        """Names of the tests that rejected."""
        return sorted({result.test for result in self.results if result.adjusted <= self.alpha})

    def __str__(self) -> str:
        status = "on the list of exact rules" if self.proven else "not proven to keep the target's law"
        if self.approximate:
            status = "approximate: it changes the target's law"
        lines = [
            f"{self.verdict}: drafter {self.drafter}, rule {self.rule} ({status})",
            f"  law         {self.tokens} tokens of {self.subject}: {self.method}",
            f"  settings    {'; '.join(self.settings)}",
            f"  samples     {self.samples:,} sequences through prefill, rounds and rollback, {self.seconds:.0f} s",
            f"  level       {self.alpha:g} for the whole family of {len(self.results)} tests",
            f"  power       a total variation of {self.detectable:.4f} of the pooled law is caught with {POWER:.0%} "
            f"probability (asked: {self.detect:g}), in whatever direction",
        ]
        lines += [f"  covered     {part}" for part in self.coverage]
        wide = [setting for part in self.coverage for setting in part.settings if setting not in self.settings]
        if wide:
            lines.append(f"    beyond the settings above, in all but the first: {'; '.join(dict.fromkeys(wide))}")
        if not self.drafted:
            lines.append("  nothing was drafted: this tested plain decoding, neither the drafter nor the rule")
        if self.detectable > self.detect:
            lines.append(f"  too few samples: {self.needed:,} sequences would reach {self.detect:g}")
        if self.gate:
            worst = ", ".join(f"{name} {value:.1e}" for name, value in self.gate.items())
            lines.append(f"  enumeration largest difference of the rule's law from the target's: {worst}")
        else:
            lines.append("  enumeration not applicable: the rule has a `verify` of its own; samples alone speak for it")
        lines.append("  p-values    smallest of each test, after correction:")
        for test in dict.fromkeys(result.test for result in self.results):
            best = self.strongest(test)
            mark = "REJECTED" if best.adjusted <= self.alpha else "ok"
            lines.append(f"    {test:<13} {best.adjusted:<9.3g} {mark:<9} {best.where}")
        for divergence in self.divergences:
            tv, kl = divergence.tv_per_token, divergence.kl_per_token
            lines.append(
                f"  divergence  {divergence.name}: TV per token {tv[0]:.4f} [{tv[1]:.4f}, {tv[2]:.4f}], "
                f"KL per token {kl[0]:.5f} [{kl[1]:.5f}, {kl[2]:.5f}] nats"
            )
        for deviation in self.deviations:
            tokens = ", ".join(f"{t}: {seen:.4f} for {law:.4f}" for t, seen, law in deviation.tokens)
            lines.append(f"  deviation   {deviation.where}: TV {deviation.total_variation:.4f} ({tokens})")
            lines.append(f"    looks like {deviation.looks_like}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        fields = {"verdict": self.verdict} | dataclasses.asdict(self)
        return json.loads(json.dumps(fields, default=lambda value: value.tolist()))

    def save(self, path: str | Path) -> tuple[Path, Path]:
        """Write `path` (JSON) and, beside it, the picture (PNG)."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        picture = path.with_suffix(".png")
        plot(self, picture)
        return path, picture


def plot(report: Report, path: Path) -> None:
    """Observed against expected frequencies of every cell, with the 99 % band of each."""
    shown = report.cases[:3]
    title = f"{report.verdict}: {report.drafter}, {report.rule}"
    figure, [panels] = figures.new_figure(1, len(shown), (4.4 * max(1, len(shown)), 4.6), title)
    for axes, case in zip(panels, shown, strict=True):
        total, kept = case.counts.sum(), case.law > 0
        law, seen = case.law[kept], case.counts[: len(case.law)][kept] / total
        order = np.argsort(law)
        band = 2.576 * np.sqrt(law * (1 - law) / total)
        low, high = np.maximum(law - band, 0.3 / total)[order], (law + band)[order]
        axes.fill_between(
            law[order], low, high, color=figures.color(6), alpha=0.35, label="99 % band of a cell", linewidth=0
        )
        observed = np.maximum(seen, 0.3 / total)
        axes.plot(law, observed, ".", color=figures.color(0), markersize=3, label="observed")
        axes.set(xscale="log", yscale="log", xlabel="expected probability")
        axes.set_title(case.name, fontsize=figures.SMALL)
        for axis in (axes.xaxis, axes.yaxis):
            figures.plain_numbers(axis)
    panels[0].set_ylabel("observed frequency")
    panels[0].legend(frameon=False, fontsize=figures.SMALL)
    figure.savefig(path, dpi=figures.DPI)
