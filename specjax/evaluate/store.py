"""Rows that survive a kill: each is on disk before the next one is begun, and what is done is not done again.

A file of JSON lines, every row known by a key that says what it is of. The records of a comparison
(`run_folder`), the jobs of the lab's calibration and the programs of the table of memory are kept so.

A process that was killed may leave half a line at the end: it is no row, and the next one written takes its
place. Several processes may add to one file, unless one of them holds its lock.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from filelock import FileLock

Row = TypeVar("Row")
Key = TypeVar("Key", bound=Hashable)


class StoreError(Exception):
    """What was kept can't be used, or not be added to; the message says what to do."""


def to_line(row: Any) -> str:
    """A row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


class Store(Generic[Row]):
    """Rows by what they are of; a later row of one key counts. Without a path, they are kept in memory alone."""

    def __init__(
        self,
        path: Path | None,
        key: Callable[[Row], Hashable],
        *,
        parse: Callable[[str], Row] = json.loads,
        line: Callable[[Row], str] = to_line,
        lock: FileLock | None = None,
    ):
        """Read what is there.

        Args:
          lock: guards the file; by default one of its own.

        Raises:
          StoreError: a damaged line, with its number.
        """
        self.path, self.key, self.parse, self.line = path, key, parse, line
        self.lock = lock or FileLock(f"{path}.lock")
        self.rows: list[Row] = []
        self.done: dict[Hashable, Row] = {}
        self._end = 0  # bytes of whole lines that were read or written
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have added."""
        if self.path is None or not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._end)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:  # not splitlines: JSON may hold U+2028 as it is
            try:
                row = self.parse(line.decode("utf-8"))
                key = self.key(row)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                where = f"{self.path}, line {len(self.rows) + 1}"
                raise StoreError(f"{where} is damaged ({error}): remove that line to redo it") from error
            self._add(key, row, len(line) + 1)

    def append(self, row: Row) -> None:
        """Add a row, on disk when this returns.

        Raises:
          OSError: it can't be written; earlier rows are kept.
        """
        if self.path is None:
            return self._add(self.key(row), row, 0)
        line = self.line(row).encode()
        with self.lock:
            self.refresh()
            with self.path.open("ab") as file:
                file.truncate(self._end)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        self._add(self.key(row), row, len(line))

    def missing(self, keys: Iterable[Key], seconds: float = math.inf) -> Iterator[Key]:
        """Those of `keys` that no row is of, as the caller comes to them; none any more once the time is over."""
        begin = time.monotonic()
        for key in keys:
            self.refresh()
            if key in self.done:
                continue
            if time.monotonic() - begin > seconds:
                return
            yield key

    def _add(self, key: Hashable, row: Row, size: int) -> None:
        self.rows.append(row)
        self.done[key] = row
        self._end += size
