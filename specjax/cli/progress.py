"""A live progress bar on stderr; where that is no terminal, a line whenever the work changes."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from specjax.cli import interrupts
from specjax.evaluate.progress import Lines


class Progress(Lines):
    """Counts finished decodings, and says what is being done."""

    def __init__(self, total: int):
        super().__init__(total)
        self.bar: Bar | None = None
        if sys.stderr.isatty():
            columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            text = TextColumn("{task.description}", markup=False)
            self.bar = Bar(*columns, text, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def stop(self) -> None:
        """Ctrl-C was heard."""
        interrupts.note()

    def describe(self, text: str) -> None:
        """Say what is being done now."""
        if self.bar is not None:
            self.bar.update(self.task, description=text)
        else:
            super().describe(text)

    def advance(self, count: int) -> None:
        """Count what is finished."""
        super().advance(count)
        if self.bar is not None:
            self.bar.advance(self.task, count)
