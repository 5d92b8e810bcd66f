"""How long work is followed: a line on stderr whenever it changes. A command line may put a bar in its place."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self


class Lines:
    """Counts finished decodings, and says what is being done."""

    def __init__(self, total: int):
        self.total, self.done, self.begin = total, 0, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""

    def stop(self) -> None:
        """Take note that the work ends early: what is done is summed up."""

    def describe(self, text: str) -> None:
        """Say what is being done now."""
        elapsed = time.monotonic() - self.begin
        print(f"[{self.done:3}/{self.total} {elapsed:5.0f} s] {text}", file=sys.stderr, flush=True)

    def advance(self, count: int) -> None:
        """Count what is finished."""
        self.done += count


class Silent(Lines):
    """Says nothing."""

    def describe(self, text: str) -> None:
        """Nothing is said."""
