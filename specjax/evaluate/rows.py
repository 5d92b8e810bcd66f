"""One row a strategy, from a run's records and measurements: what `summary.json` holds and the table shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specjax import memory, offload
from specjax.engine import Engine
from specjax.evaluate import metrics
from specjax.evaluate.record import Record

BASELINE = "none"


@dataclass(frozen=True)
class Contender:
    """What is known of a strategy beside its records: what it is, and what it costs. `None`: not measured (yet)."""

    settings: str  # the drafter, as it prints itself
    label: str
    exact: bool | None  # by a proven rule, and drafts that passed the check; None: its code failed
    checked: bool = False  # whether drafts were checked (`measure.draft_fault`, committed cache)
    fault: str = ""  # what the check found
    compile_s: float | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    added_bytes: Mapping[str, int] | None = None
    peak_bytes: int | None = None  # held at once at verification, from shapes
    compiler_bytes: int | None = None  # the compiled loop on this backend: argument + output + temporaries - alias
    temp_bytes: int | None = None  # of these, temporaries
    offloaded_bytes: int | None = None  # the drafter's weights, in host memory between drafts
    fetch_s: float | None = None  # to bring them in, measured apart from the round

    @classmethod
    def of(cls, engine: Engine, batch: int, capacity: int) -> Contender:
        """What an engine says of itself, and its shapes of its memory."""
        program, own, drafter = engine.program, engine.drafter_params, engine.program.drafter
        offloaded = isinstance(drafter, offload.Offloaded)
        sizes: dict[str, Any] = {"batch": batch, "capacity": capacity, "cache_dtype": engine.cache_dtype}
        account = memory.account(program, engine.params, own, **sizes)
        if offloaded:
            account = account.offloaded()
        return cls(
            settings=repr(drafter.inner if isinstance(drafter, offload.Offloaded) else drafter),
            label=drafter.label,
            exact=program.exact,
            added_bytes=account.added_bytes,
            peak_bytes=account.peak_bytes,
            offloaded_bytes=offload.size(own) if offloaded else None,
            fetch_s=offload.fetch_s(own) if offloaded else None,
        )

    def measured(self, draft_s: float, verify_s: float, fault: str) -> Contender:
        """With the halves of its rounds, and the check of its drafts: what fails it is not exact under any rule."""
        exact = self.exact and not fault
        return dataclasses.replace(self, draft_s=draft_s, verify_s=verify_s, checked=True, fault=fault, exact=exact)


_KINDS: dict[str, Any] = {"settings": str, "label": str, "fault": str, "exact": bool, "checked": bool}


def make_rows(
    contenders: Mapping[str, Contender], records: Sequence[Record], *, greedy: bool, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows in the order of `contenders`; the baseline is the strategy named `none`, where there is one."""
    by_drafter: dict[str, dict[str, Record]] = {name: {} for name in contenders}
    for record in records:
        if record.drafter in by_drafter and record.usable:
            by_drafter[record.drafter][record.question_id] = record
    baseline = by_drafter.get(BASELINE, {})
    plain = contenders.get(BASELINE)
    plain_round_s = None
    if plain is not None and plain.draft_s is not None and plain.verify_s is not None:
        plain_round_s = plain.draft_s + plain.verify_s
    return [
        _row(name, known, by_drafter[name], baseline, plain_round_s, greedy, seed) for name, known in contenders.items()
    ]


def remake_rows(
    rows: Sequence[Mapping[str, Any]], records: Sequence[Record], *, greedy: bool, seed: int = 0
) -> list[dict[str, Any]]:
    """A summary's rows from its records and its measurements: what a file says of its own sums is not believed.

    Raises:
      ValueError: a measurement that none can be, or none for a drafter; KeyError, TypeError: one that is missing.
    """
    contenders = {}
    for row in rows:
        values = {field.name: row[field.name] for field in dataclasses.fields(Contender)}
        for name, value in values.items():
            kind = (
                str if name in ("settings", "label", "fault") else bool if name in ("exact", "checked") else int | float
            )
            parts = list(value.values()) if isinstance(value, dict) else [] if value is None else [value]
            if not all(isinstance(part, kind) and part == part for part in parts):
                raise ValueError(f"{name} of {row['drafter']} is {value!r:.40}")
        contenders[row["drafter"]] = Contender(**values)
    made = make_rows(contenders, records, greedy=greedy, seed=seed)
    for new, old in zip(made, rows, strict=True):
        if new["greedy_difference"] is not None:
            new["greedy_difference"]["margin"] = (old.get("greedy_difference") or {}).get("margin")
    return made


def _row(
    name: str,
    known: Contender,
    records: Mapping[str, Record],
    baseline: Mapping[str, Record],
    plain_round_s: float | None,
    greedy: bool,
    seed: int,
) -> dict[str, Any]:
    own = list(records.values())
    summary, costs = metrics.summarize(own, seed=seed).as_json(), dataclasses.asdict(known)
    speedup = _speedup(own, baseline)
    difference = None if not greedy or name == BASELINE else first_difference(own, baseline)
    equal = None if not greedy or not baseline or not own else difference is None
    row = {"drafter": name, **costs, **summary} | {
        "tokens_per_second": tokens_per_second(own),
        "speedup": speedup,
        "estimated_speedup": metrics.expected_speedup(
            summary["acceptance_length"], known.draft_s, known.verify_s, plain_round_s
        ),
        "prefill_s": sum(record.prefill_s / record.batch_rows for record in own),
        "decode_s": sum(record.decode_s / record.batch_rows for record in own),
        "seconds_per_token_quantiles": metrics.quantiles([_seconds_per_token(r) for r in own if len(r.tokens) > 1]),
        "greedy_equal": equal,
        "greedy_difference": difference,
        "categories": _by_category(own, baseline),
    }
    return row | {"notes": _notes(row)}


def tokens_per_second(records: Sequence[Record]) -> float | None:
    """Tokens of rounds by the time of decoding, the prompt and its first token apart; `None` if no round was run."""
    tokens = sum(int(record.counts.emitted.sum()) for record in records)
    return None if not tokens else metrics.ratio(tokens, sum(record.decode_s / record.batch_rows for record in records))


def first_difference(records: Sequence[Record], baseline: Mapping[str, Record]) -> dict[str, Any] | None:
    """The first prompt whose tokens differ from the baseline's, and where; `None` if there is none."""
    for record in records:
        if record.question_id not in baseline:
            continue
        theirs = baseline[record.question_id].tokens
        if record.tokens != theirs:
            pairs = list(zip(record.tokens, theirs, strict=False))
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            return {
                "question_id": record.question_id,
                "position": position,  # of the generated tokens, counted from 0
                "token": record.tokens[position] if position < len(record.tokens) else None,
                "baseline_token": theirs[position] if position < len(theirs) else None,
            }
    return None


def _speedup(records: Sequence[Record], baseline: Mapping[str, Record]) -> float | None:
    """Ratio of tokens/s on the prompts that both decoded in one session."""
    own = [
        record
        for record in records
        if record.question_id in baseline and baseline[record.question_id].session == record.session
    ]
    mine, theirs = tokens_per_second(own), tokens_per_second([baseline[record.question_id] for record in own])
    return None if mine is None or theirs is None else metrics.ratio(mine, theirs)


def _seconds_per_token(record: Record) -> float:
    return record.decode_s / (len(record.tokens) - 1)


def _by_category(records: Sequence[Record], baseline: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.category, []).append(record)
    return {
        category: {
            "prompts": len(group),
            "acceptance_length": metrics.summarize(group).acceptance_length,
            "tokens_per_second": tokens_per_second(group),
            "speedup": _speedup(group, baseline),
        }
        for category, group in groups.items()
    }


def _notes(row: Mapping[str, Any]) -> list[str]:
    notes = [row["label"]] if row["label"] else []
    if row["drafter"] != BASELINE and row["speedup"] is not None and row["speedup"] < 1:
        notes.append(f"does not pay here: {row['speedup']:.2f} x the speed of none")
    if row["fault"]:
        notes.append(f"not exact: {row['fault']}")
    elif row["exact"] is False:
        notes.append("approximate: the rule is not proven to keep the target's probabilities")
    if (difference := row["greedy_difference"]) is not None:
        notes.append(
            f"greedy output differs from none's, first in {difference['question_id']} at token {difference['position']}"
        )
    if row["acceptance_rate"] is None and row["drafter"] != BASELINE and row["rounds"]:
        notes.append("nothing was drafted")
    return notes
