"""How many tokens a round is expected to emit: from one acceptance rate, or from what a run measured.

With S_k the share of rounds in which at least k drafts are accepted, a window of K emits

    E = 1 + S_1 + ... + S_K

tokens a round. If every token is accepted independently with probability alpha, S_k = alpha^k and
E = (1 - alpha^(K + 1)) / (1 - alpha): Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafter import Drafter
from specjax.evaluate import run_folder as records_of
from specjax.memory.account import Account
from specjax.memory.hardware import GiB
from specjax.memory.strategy import Strategy
from specjax.types import Counts


@dataclass(frozen=True)
class Profile:
    """Acceptance by position. `survival[k - 1]` is S_k; beyond its end, never drafted, the last ratio goes on."""

    survival: tuple[float, ...]
    source: str  # as it is printed beside every figure that rests on it
    assumed: bool = False

    @classmethod
    def constant(cls, alpha: float) -> Profile:
        """Every token accepted with probability `alpha`, whatever came before: an assumption."""
        if not 0 <= alpha <= 1:
            raise ValueError(f"acceptance {alpha:g}: must be a probability, 0 to 1, or a run folder")
        return cls((alpha,), f"assumed: each drafted token accepted with probability {alpha:g}", assumed=True)

    @classmethod
    def conditional(cls, rates: Sequence[float], source: str) -> Profile:
        """From the acceptance at each position among the rounds that reached it; all rounds draft."""
        return cls(tuple(itertools.accumulate(rates, lambda a, b: a * b)), source)

    @classmethod
    def counted(cls, counts: Sequence[Counts], source: str) -> Profile:
        """From raw counts, as far as the longest draft; rounds that drafted less count, as in an acceptance length."""
        drafted, accepted, emitted = (
            np.concatenate([np.asarray(getattr(prompt, name)) for prompt in counts] or [np.zeros(0, np.int32)])
            for name in ("drafted", "accepted", "emitted")
        )
        accepted = accepted[emitted > 0]
        return cls(tuple(float(np.mean(accepted >= k)) for k in range(1, int(drafted.max(initial=0)) + 1)), source)

    def expected_tokens(self, window: int) -> float:
        """Tokens a round of `window` drafts emits on average, the bonus token included."""
        known = self.survival[:window]
        total, last = 1.0 + sum(known), known[-1] if known else 0.0
        for _ in range(window - len(known)):
            last *= self.ratio
            total += last
        return total

    @property
    def ratio(self) -> float:
        """The last position's conditional rate, which stands for those beyond."""
        if not self.survival:
            return 0.0
        before = self.survival[-2] if len(self.survival) > 1 else 1.0
        return self.survival[-1] / before if before else 0.0

    def note(self, window: int) -> str:
        """What a window beyond the measured positions assumes; empty within."""
        if self.assumed or window <= len(self.survival):
            return ""
        return f"beyond position {len(self.survival)}, not measured, {self.ratio:.2f} of what came before is assumed"


@dataclass(frozen=True)
class MeasuredAcceptance:
    """What a run says of one drafter."""

    profile: Profile
    acceptance_length: float
    interval: tuple[float, float] | None
    target: str
    settings: str


def read_run(folder: Path) -> dict[str, MeasuredAcceptance]:
    """Acceptance of every drafter of a run folder, by the name that the run gave it.

    Raises:
      ValueError: no folder of a run that ended, a damaged one, or one without an acceptance.
    """
    summary, manifest, records = records_of.read_run(folder)
    try:
        target = manifest["target"]["name"]
        found = {}
        for row in summary["rows"]:
            if row["acceptance_length"] is None:
                continue
            source = f"measured on {target}, {row['rounds']} rounds, {folder}"
            own = [record for record in records if record.drafter == row["drafter"]]
            counts = [record.counts for record in own if record.finish != "not_finite"]
            profile = Profile.counted(counts, source) if counts else Profile.conditional(row["per_position"], source)
            interval = row["acceptance_length_interval"]
            found[row["drafter"]] = MeasuredAcceptance(
                profile, row["acceptance_length"], interval and tuple(interval), target, row["settings"]
            )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} was not written by this version: {type(error).__name__}: {error}") from error
    return found


@dataclass(frozen=True)
class Acceptance:
    """Profiles by drafter, and one for all others; `None` where those are unknown."""

    by_name: Mapping[str, Profile]
    default: Profile | None
    stated: tuple[str, ...] = ()  # names that were written out, not those that a run has

    @classmethod
    def parse(cls, texts: Sequence[str], assumed: float | None = None) -> Acceptance:
        """From `0.7`, `fp8=0.95` and run folders, later ones first; `assumed` for what none of them names."""
        by_name: dict[str, Profile] = {}
        stated: list[str] = []
        default = None if assumed is None else Profile.constant(assumed)
        for text in texts:
            name, equals, value = text.rpartition("=")
            if equals and not os.path.exists(text):  # Path.exists raises for a name that is too long
                by_name[name] = Profile.constant(_probability(value))
                stated.append(name)
            elif os.path.isdir(text) or not _is_number(text):
                by_name |= {name: measured.profile for name, measured in read_run(Path(text)).items()}
            else:
                default = Profile.constant(_probability(text))
        return cls(by_name, default, tuple(stated))

    def check(self, specs: Sequence[str]) -> None:
        """Refuse a rate for a drafter that is none of `specs`: it would change nothing, and not be missed."""
        known = {name for spec in specs for name in (spec, spec.partition(":")[0])}
        for name in self.stated:
            if name not in known:
                raise ValueError(f"acceptance of {name!r}: no such drafter is asked for, only {', '.join(specs)}")

    def of(self, spec: str) -> Profile | None:
        """The profile of a drafter by its full text, else by its name without settings."""
        return self.by_name.get(spec, self.by_name.get(spec.partition(":")[0], self.default))


def match(spec: str, drafter: Drafter, run: Mapping[str, MeasuredAcceptance]) -> MeasuredAcceptance | None:
    """The run's entry for a strategy: of the same text, else of the same settings, else of the same name."""
    if spec in run:
        return run[spec]
    same = [measured for measured in run.values() if measured.settings == repr(drafter)]
    return same[0] if same else run.get(spec.partition(":")[0])


def join(accounts: Sequence[tuple[Strategy, Account]], run: Mapping[str, MeasuredAcceptance]) -> list[dict[str, Any]]:
    """One row a strategy that the run measured; `best`: no other one has more acceptance for as little memory.

    Raises:
      ValueError: a run that measured none of the strategies.
    """
    rows = []
    for strategy, account in accounts:
        drafter = strategy.shapes()[0].drafter
        if measured := match(strategy.drafter, drafter, run):
            added = sum(account.added_bytes.values())
            rows.append({
                "drafter": strategy.drafter,
                "added_bytes": added,
                "acceptance_length": measured.acceptance_length,
                "interval": measured.interval,
                "acceptance_length_per_added_gib": measured.acceptance_length / (added / GiB) if added else None,
                "expected_at_window": measured.profile.expected_tokens(drafter.num_speculative_tokens),
                "window": drafter.num_speculative_tokens,
                "measured_on": measured.target,
                "measured_as": measured.settings,
            })  # fmt: skip
    if not rows:
        names = ", ".join(strategy.drafter for strategy, _ in accounts)
        raise ValueError(f"the run measured none of {names}: it has {', '.join(run)}")
    for row in rows:
        row["best"] = not any(_beats(other, row) for other in rows)
    return rows


def _beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pair = (one["acceptance_length"], -one["added_bytes"]), (other["acceptance_length"], -other["added_bytes"])
    return pair[0] != pair[1] and all(a >= b for a, b in zip(*pair, strict=True))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _probability(text: str) -> float:
    if not _is_number(text):
        raise ValueError(f"acceptance {text!r}: give a probability, DRAFTER=PROBABILITY or a run folder")
    return float(text)


def as_json(profile: Profile | None) -> dict[str, Any] | None:
    """Plain values."""
    if profile is None:
        return None
    return {"survival": list(profile.survival), "source": profile.source, "assumed": profile.assumed}
