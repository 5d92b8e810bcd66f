"""What a comparison gave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.engine import NotFiniteError
from specjax.evaluate import table
from specjax.evaluate.comparison import Comparison
from specjax.evaluate.record import Record


@dataclass(frozen=True, repr=False)
class Result:
    """A row a drafter, a record a decoded prompt; it prints as the table."""

    comparison: Comparison
    summary: dict[str, Any]  # as `summary.json` holds it
    records: tuple[Record, ...]
    total: int  # records that a complete run has
    folder: Path | None = None
    stopped: KeyboardInterrupt | NotFiniteError | None = None  # what ended it early

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All figures, a drafter at a time."""
        return list(self.summary["rows"])

    @property
    def title(self) -> str:
        """What was decoded, in a line."""
        return str(self.summary["title"])

    @property
    def failed(self) -> list[str]:
        """Drafters whose code failed; the row's label says how."""
        return [row["drafter"] for row in self.rows if row["exact"] is None]

    @property
    def done(self) -> int:
        """Prompts that were decoded, each drafter's counted."""
        return len({(record.drafter, record.question_id) for record in self.records if record.usable})

    def __repr__(self) -> str:
        return "\n".join([table.as_text(self.rows, self.title), *self._stopped()])

    def _repr_html_(self) -> str:
        lines = [line for section in table.sections(self.rows) for line in section]
        below = [*(f"{name}: {note}" for name, note in table.notes(self.rows)), *self._stopped()]
        return table.as_html([row["drafter"] for row in self.rows], lines, self.title, below)

    def _stopped(self) -> list[str]:
        if self.stopped is None:
            return []
        reason = str(self.stopped) or type(self.stopped).__name__
        return [f"stopped after {self.done} of {self.total} results: {reason}"]
