"""One line of a run's records, and one row of its summary: written, read, and refused if no run can have written it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.types import Counts

CHECKSUM = ', "crc32": '
FIGURES = ("acceptance_length", "draft_s", "verify_s", "fetch_s", "offloaded_bytes")
"""Of a row of `summary.json`: each is a number, or `null` where it was not measured."""


@dataclass(frozen=True)
class Record:
    """One prompt, decoded by one drafter. `counts` has one entry a round."""

    question_id: str
    category: str
    drafter: str
    prompt_tokens: int
    capacity: int
    batch_rows: int  # prompts that were decoded together: `prefill_s` and `decode_s` are theirs
    session: str  # of one process: a speedup compares times of one session
    finish: str  # "end", "length" or "not_finite"
    prefill_s: float
    decode_s: float
    tokens: list[int]
    text: str
    counts: Counts

    @property
    def usable(self) -> bool:
        """Whether it was decoded to its end, and need not be again."""
        return self.finish != "not_finite"

    def line(self) -> str:
        """As a line of JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["counts"] = {
            field.name: np.asarray(getattr(self.counts, field.name)).tolist() for field in dataclasses.fields(Counts)
        }
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        return f"{text[:-1]}{CHECKSUM}{zlib.crc32(text.encode())}}}\n"

    @classmethod
    def parse(cls, line: str) -> Record:
        """Read a line; `ValueError`, `KeyError` and others if no run can have written it.

        Lines without a checksum are those of earlier versions; their counts are checked as all are.
        """
        text, known, checksum = line.rpartition(CHECKSUM)
        if known and zlib.crc32((line := text + "}").encode()) != int(checksum.strip().removesuffix("}")):
            raise ValueError("its checksum is another one")
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError(f"{values!r:.40} is no record")
        values["counts"] = _parse_counts(values["counts"])
        for field in dataclasses.fields(cls):
            value = values[field.name]
            if field.type == "str":
                right = isinstance(value, str)
            else:
                right = field.type == "Counts" or _are_figures(value if field.type == "list[int]" else [value])
            if not right:
                raise ValueError(f"{field.name} is {value!r:.40}")
        check_names(values["question_id"], values["category"], values["drafter"])
        record = cls(**values)
        _check_counts(record)
        return record


def check_names(*names: str) -> None:
    """Refuse what a terminal would obey: names of prompts and drafters are printed as they are.

    Raises:
      ValueError: a control character, with the name.
    """
    for name in names:
        if re.search(r"[\x00-\x1f\x7f-\x9f]", name):
            raise ValueError(f"control character in {name!r:.60}")


def check_rows(rows: Any) -> None:
    """Refuse figures of `summary.json` that no run can have written: they would pass for measurements.

    Raises:
      ValueError: with the figure.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "drafter" in row for row in rows):
        raise ValueError("rows is no list of drafters' results")
    for row in rows:
        check_names(*(value for value in row.values() if isinstance(value, str)))
        interval = row.get("acceptance_length_interval")
        right = {name: row.get(name) is None or _are_figures([row[name]]) for name in FIGURES} | {
            "drafter": isinstance(row["drafter"], str),
            "acceptance_length_interval": interval is None or (_are_figures(interval) and len(interval) == 2),
            "per_position": _are_figures(row.get("per_position", []), most=1),
        }
        for name in (name for name in right if not right[name]):
            raise ValueError(f"{name} of {row['drafter']} is {row[name]!r:.40}")


def _are_figures(values: Any, most: float = sys.float_info.max) -> bool:
    """A list of numbers from 0 to `most`: NaN and infinity are none."""
    return isinstance(values, list) and all(isinstance(value, int | float) and 0 <= value <= most for value in values)


def _parse_counts(raw: Any) -> Counts:
    dtypes: dict[str, Any] = {"overlap": np.float32, "cut": np.bool_}
    counts: dict[str, Any] = {name: np.asarray(raw[name], dtypes.get(name, np.int32)) for name in raw}
    return Counts(**counts)


def _check_counts(record: Record) -> None:
    """Refuse counts that no decoding has: sums and tables would be made of them."""
    drafted, tested, accepted, emitted, overlap, cut = (
        np.asarray(getattr(record.counts, field.name)) for field in dataclasses.fields(Counts)
    )
    if any(one.shape != (len(emitted),) for one in (drafted, tested, accepted, emitted, overlap, cut)):
        raise ValueError("counts of unequal length")
    if min(one.min(initial=0) for one in (drafted, tested, accepted, emitted)) < 0:
        raise ValueError("negative counts")
    if drafted.max(initial=0) > record.capacity or emitted.sum(dtype=np.int64) != max(0, len(record.tokens) - 1):
        raise ValueError("counts of other tokens than it has: all but the first are a round's")
    if np.any(tested > drafted):
        raise ValueError("more drafts tested than there were")
    if np.any(accepted > np.minimum(drafted, emitted)) or np.any(emitted - 1 > accepted):
        raise ValueError("counts that no round has: accepted drafts and one more are emitted, or fewer")
