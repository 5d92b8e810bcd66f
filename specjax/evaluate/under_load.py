"""What a run's records say of a system under load: acceptance that falls, and four fingerprints.

A fingerprint that the records can't show is named as not observable, with what would have to be recorded.

    falling acceptance     per request: Kendall's tau of tokens emitted against the round's number, one-sided,
                           Holm over requests, and a fall of at least FALL from the first half to the second
    shrinking batch        rows that still decode, by round, of prompts that were decoded together
    rejection bursts       rounds in a row that accept nothing, more of them than chance makes (a test of runs, Wald
                           and Wolfowitz 1940): a token costs a whole round there
    bandwidth, arithmetic  bytes and operations of a round, from shapes, by its measured time
    offload queue          what is asked of the link against what it carries, where weights were offloaded
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from specjax import plugins
from specjax.drafter import Drafter
from specjax.evaluate.record import Record
from specjax.evaluate.run_folder import read_run
from specjax.exactness.statistics import holm
from specjax.memory import hardware, rates

LEVEL = 0.01  # over the requests of one drafter: family-wise, or of all together
FALL = 0.2  # of the first half's tokens a round: smaller falls are not worth a warning
SHORTEST = 8  # rounds: below, no order of them is rare enough


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What one drafter's records say."""

    trends: list[Trend]
    fingerprints: list[Fingerprint]

    @property
    def warnings(self) -> list[str]:
        """Requests whose acceptance falls, or that there are none."""
        falling = [trend for trend in self.trends if trend.falling]
        if not self.trends:
            return [f"falling acceptance: not observable: no request has {SHORTEST} whole rounds"]
        if not falling:
            return [
                f"falling acceptance: none of {len(self.trends)} requests (Kendall's tau, Holm at {LEVEL:g}, and a "
                f"fall of {FALL:.0%} from the first half to the second)"
            ]
        return [
            f"WARNING {trend.question_id}: {trend.first_half:.2f} tokens a round, then {trend.second_half:.2f} "
            f"(p = {trend.p_value:.1e}, {trend.rounds} rounds)"
            for trend in falling
        ]

    def __repr__(self) -> str:
        return "\n".join([*self.warnings, *(f"{found.shown:3}  {found}" for found in self.fingerprints)])


def diagnose(
    folder: str | Path, device: str | None = None, drafters: Sequence[str | Drafter] = ()
) -> dict[str, Diagnosis]:
    """Read a run's folder, a drafter at a time. No code is run that its files name.

    Args:
      device: what it ran on, for its peaks (`specjax.memory.hardware`).
      drafters: those of the run that are files: without them, what their rounds move is not known.

    Raises:
      ValueError: no folder of a run that ended, or no such device.
    """
    summary, manifest, records = read_run(Path(folder))
    known = hardware.find(device) if device else None
    given = [plugins.load_drafter(one) if isinstance(one, str) else one for one in drafters]
    timed = min((record.capacity for record in records), default=summary.get("capacity", 0))
    found = {}
    for row in summary["rows"]:
        own = [record for record in records if record.drafter == row["drafter"]]
        achieved = rates.of_row(row, manifest, timed, known, given)
        found[row["drafter"]] = Diagnosis(trends(own), fingerprints(own, row, achieved))
    return found


@dataclass(frozen=True)
class Trend:
    """Tokens a round of one request, early and late."""

    question_id: str
    rounds: int
    first_half: float
    second_half: float
    p_value: float
    falling: bool = False

    @property
    def fall(self) -> float:
        """Share of the first half that is lost."""
        return 1 - self.second_half / self.first_half


def trends(records: Sequence[Record]) -> list[Trend]:
    """Every request of one drafter that has SHORTEST rounds; shortened rounds are left out, as they end every text."""
    found = []
    for record in records:
        emitted = np.asarray(record.counts.emitted)[~np.asarray(record.counts.cut, bool)]
        if len(emitted) < SHORTEST:
            continue
        halves = np.split(emitted, [len(emitted) // 2])
        p_value = 1.0
        if emitted.min() < emitted.max():
            p_value = float(stats.kendalltau(np.arange(len(emitted)), emitted, alternative="less").pvalue)
        found.append(Trend(record.question_id, len(emitted), float(halves[0].mean()), float(halves[1].mean()), p_value))
    adjusted = holm([trend.p_value for trend in found], [1.0] * len(found))
    return [
        dataclasses.replace(trend, falling=p_value <= LEVEL and trend.fall >= FALL)
        for trend, p_value in zip(found, adjusted, strict=True)
    ]


def effective_batch(records: Sequence[Record]) -> dict[str, Any] | None:
    """Rows that decode at once, averaged over rounds, of those that began; `None` where rows were decoded alone."""
    rounds, slots = 0, 0
    for group in batches(records):
        lengths = [len(record.counts.emitted) for record in group]
        rounds += sum(lengths)
        slots += max(lengths, default=0) * len(lengths)
    if not slots or all(record.batch_rows == 1 for record in records):
        return None
    rows = float(np.mean([record.batch_rows for record in records]))
    return {"rows": rows, "effective": rows * rounds / slots, "share": rounds / slots}


def batches(records: Sequence[Record]) -> list[list[Record]]:
    """Records that were decoded together: they stand behind each other and share their times."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        key = record.session, record.capacity, record.batch_rows, record.prefill_s, record.decode_s
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def bursts(records: Sequence[Record]) -> dict[str, Any] | None:
    """Of the rounds that tested drafts, those in a row that accept none; `None` where nothing was drafted."""
    rejections: list[np.ndarray] = []
    times: list[float] = []
    for group in batches(records):
        slowest = max(len(record.counts.emitted) for record in group)
        for record in group:
            rejections.append(np.asarray(record.counts.accepted)[np.asarray(record.counts.tested) > 0] == 0)
            emitted = np.asarray(record.counts.emitted)
            times += list(np.repeat(record.decode_s / max(1, slowest) / np.maximum(emitted, 1), emitted))
    pooled = np.concatenate(rejections or [np.zeros(0, bool)])
    if not len(pooled) or not times:
        return None
    middle, high = np.percentile(times, [50, 99])
    return {
        "longest": max(length for flags in rejections for length in [0, *runs(flags)]),
        "rejected_rounds": float(pooled.mean()),
        "p50_s": float(middle),
        "p99_s": float(high),
        "spike": float(high / middle) if middle else 1.0,
        "p_value": clustering(rejections),
    }


def runs(flags: np.ndarray) -> list[int]:
    """Lengths of the runs of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(flags, int), [0]])))
    return [int(end - begin) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def clustering(sequences: Sequence[np.ndarray]) -> float:
    """How likely chance makes so few runs of equal flags, in sequences that are each in random order.

    Runs come and go in pairs where one kind is rare, hence the correction by 1, not 1/2: without it, 3 % of rejections
    alarm five times too often.
    """
    excess = variance = 0.0
    for flags in sequences:
        rounds, ones = len(flags), int(np.sum(flags))
        if 0 < ones < rounds:
            expected = 1 + 2 * ones * (rounds - ones) / rounds
            excess += 1 + np.count_nonzero(np.diff(flags)) - expected
            variance += (expected - 1) * (expected - 2) / (rounds - 1)
    return float(stats.norm.cdf((excess + 1) / variance**0.5)) if variance else 1.0


@dataclass(frozen=True)
class Fingerprint:
    """One of the four, as text. `seen` is `None` where the records can't tell."""

    name: str
    seen: bool | None
    text: str

    @property
    def shown(self) -> str:
        """Whether it was seen, in a word."""
        return {True: "yes", False: "no", None: "?"}[self.seen]

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def fingerprints(
    records: Sequence[Record], row: Mapping[str, Any], achieved: Mapping[str, float] | str
) -> list[Fingerprint]:
    """The four of one drafter.

    Args:
      row: the drafter's row of `summary.json`.
      achieved: `bytes_per_s`, `flop_per_s` and `ridge` (operations a byte) of its rounds, or why they are unknown.
    """
    return [_shrinking(records), _spikes(records), _bound(achieved), _queue(row)]


def _shrinking(records: Sequence[Record]) -> Fingerprint:
    name, found = "shrinking effective batch", effective_batch(records)
    if found is None:
        return Fingerprint(name, None, "not observable: rows were decoded one at a time (--batch-size 1)")
    text = f"{found['effective']:.2f} of {found['rows']:.2f} rows decode on average"
    return Fingerprint(name, found["share"] < 1 - FALL, text)


def _spikes(records: Sequence[Record]) -> Fingerprint:
    name, found = "latency spikes in rejection bursts", bursts(records)
    if found is None:
        return Fingerprint(name, None, "not observable: nothing was drafted")
    text = (
        f"up to {found['longest']} rounds in a row accept nothing, {found['rejected_rounds']:.0%} of all that drafted "
        f"(p = {found['p_value']:.1e} that chance clusters them so, seen at {LEVEL:g}); "
        f"a token takes {found['p99_s'] * 1e3:.1f} ms at p99, {found['spike']:.2f} x the median "
        "(of rounds of equal time: single rounds are not timed)"
    )
    return Fingerprint(name, found["spike"] > 1 + FALL and found["p_value"] <= LEVEL, text)


def _bound(achieved: Mapping[str, float] | str) -> Fingerprint:
    name = "high bandwidth with moderate compute"
    if isinstance(achieved, str):
        return Fingerprint(name, None, f"not observable: {achieved}")
    intensity = achieved["flop_per_s"] / achieved["bytes_per_s"]
    memory, arithmetic = (achieved[kind] / 1e9 for kind in ("bytes_per_s", "flop_per_s"))
    text = f"{memory:.1f} GB/s and {arithmetic:.1f} GFLOP/s: {intensity:.1f} a byte"
    if "ridge" not in achieved:
        return Fingerprint(name, None, text + "; against which peak is not observable: give --device")
    text += f", the device's ridge is at {achieved['ridge']:.0f}; {achieved['share']:.0%} of its bandwidth"
    return Fingerprint(name, intensity < achieved["ridge"] and achieved["share"] > 0.5, text)


def _queue(row: Mapping[str, Any]) -> Fingerprint:
    name = "growing offload queue"
    if not row.get("offloaded_bytes"):
        return Fingerprint(name, None, "not observable: nothing was offloaded (--offload host)")
    round_s = (row.get("draft_s") or 0) + (row.get("verify_s") or 0)
    if not row.get("fetch_s") or not round_s:
        return Fingerprint(name, None, "not observable: the fetch or the round was not timed")
    asked, carried = row["offloaded_bytes"] / round_s, row["offloaded_bytes"] / row["fetch_s"]
    text = f"{asked / 1e9:.2f} GB/s asked (a fetch a round), {carried / 1e9:.2f} GB/s carried when measured apart"
    return Fingerprint(name, asked > carried, text)
