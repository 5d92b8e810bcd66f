"""Evaluation prompts: JSON lines in Spec-Bench's form, and the fixed rule by which a sample is drawn.

One prompt a line: `{"question_id": "qa-01", "category": "qa", "turns": ["..."]}`. Only the first turn is
used. A prompt's place in its file is its row, from which its randomness comes: a sample, an order or a
batch doesn't change it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specjax.evaluate.record import check_names


@dataclass(frozen=True)
class Prompt:
    """One prompt. `row` is its place in the file, counted from 0."""

    question_id: str
    category: str
    text: str
    row: int


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file, in its order, and the file's SHA-256."""

    name: str
    prompts: tuple[Prompt, ...]
    sha256: str

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def categories(self) -> tuple[str, ...]:
        """Kinds of prompts, in the order of their first appearance."""
        return tuple(dict.fromkeys(prompt.category for prompt in self.prompts))


def builtin() -> PromptSet:
    """The prompts that come with specjax (experiments/prompts)."""
    file = resources.files("specjax.experiments").joinpath("prompts/builtin.jsonl")
    return _read("builtin", file.read_bytes())


def load(source: str | Path | Sequence[str] | None = None) -> PromptSet:
    """Read a file of prompts, or take texts; without either, the prompts that come with specjax.

    Raises:
      ValueError: no such file, or a line that is no prompt, named.
    """
    if source is None:
        return builtin()
    if not isinstance(source, str | Path):
        return _read("texts", "\n".join(json.dumps({"turns": [text]}) for text in source).encode())
    try:
        return _read(str(source), Path(source).expanduser().read_bytes())
    except OSError as error:
        raise ValueError(f"no prompts in {source}: {error.strerror or error}; give a file of JSON lines") from error


def _read(name: str, content: bytes) -> PromptSet:
    lines = content.decode("utf-8-sig", "replace").split("\n")  # not splitlines: JSON may hold U+2028 as it is
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    prompts = tuple(_parse(line, f"{name}, line {number}", row) for row, (number, line) in enumerate(numbered))
    if not prompts:
        raise ValueError(f"{name} holds no prompts: give a file of JSON lines with question_id, category and turns")
    twice, count = Counter(prompt.question_id for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{name}: question_id {twice!r} stands there twice: results are kept by it, make it unique")
    return PromptSet(name, prompts, hashlib.sha256(content).hexdigest())


def select(prompts: PromptSet, categories: Sequence[str] = (), limit: int | None = None) -> list[Prompt]:
    """At most `limit` prompts of some categories (none named: all), in the file's order.

    The sample is balanced: categories get equal shares, the first ones one more. A share of n takes, of
    the category's prompts in order of length, the middles of n equal parts. It is the same every time.

    Raises:
      ValueError: an unknown category, with the known ones.
    """
    for category in categories:
        if category not in prompts.categories:
            raise ValueError(f"unknown category {category!r}: {prompts.name} has {', '.join(prompts.categories)}")
    kinds = [kind for kind in prompts.categories if not categories or kind in categories]
    pools = {kind: [prompt for prompt in prompts.prompts if prompt.category == kind] for kind in kinds}
    shares = _shares([len(pool) for pool in pools.values()], limit)
    chosen: list[Prompt] = []
    for pool, share in zip(pools.values(), shares, strict=True):
        by_length = sorted(pool, key=lambda prompt: (len(prompt.text), prompt.row))
        chosen += [by_length[(2 * i + 1) * len(pool) // (2 * share)] for i in range(share)]
    return sorted(chosen, key=lambda prompt: prompt.row)


def _shares(sizes: list[int], limit: int | None) -> list[int]:
    """Deal `limit` out one at a time, in turn, to those who still have some."""
    if limit is None or limit >= sum(sizes):
        return list(sizes)
    shares, turn = [0] * len(sizes), 0
    while sum(shares) < limit:
        if shares[turn] < sizes[turn]:
            shares[turn] += 1
        turn = (turn + 1) % len(sizes)
    return shares


def _parse(line: str, where: str, row: int) -> Prompt:
    form = '{"question_id": ..., "category": ..., "turns": ["the prompt", ...]}'
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON ({error}): write {form}") from error
    turns = value.get("turns") if isinstance(value, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ValueError(f"{where} has no list of texts under `turns`: write {form}")
    if not turns[0].strip():
        raise ValueError(f"{where} is an empty prompt: give it a text, or remove the line")
    question_id, category = str(value.get("question_id", row)), str(value.get("category", "default"))
    try:
        (question_id + category + turns[0]).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half a character ({error.reason}): repair its \\u escapes") from error
    try:
        check_names(question_id, category)
    except ValueError as error:
        raise ValueError(f"{where}: {error}: name it otherwise") from error
    return Prompt(question_id, category, turns[0], row)
