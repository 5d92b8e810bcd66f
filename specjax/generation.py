"""What decoding gives back: tokens, text and raw counts, in a form that prints well."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from specjax.types import Counts

_SHOWN = 60  # characters of a text, where it stands among others


@dataclass(frozen=True, repr=False)
class Generation:
    """One row's result. `counts` holds numpy arrays, one entry a round."""

    tokens: list[int]
    counts: Counts
    finish: str  # "end" (an end id was emitted), "length" (budget spent) or "not_finite"
    text: str | None = None  # without control tokens; None: the target has no tokenizer

    @property
    def rounds(self) -> int:
        """Forward passes of the target after the prompt's own."""
        return len(self.counts.emitted)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round, the bonus token included; None without a round."""
        return float(np.sum(self.counts.emitted)) / self.rounds if self.rounds else None

    def __repr__(self) -> str:
        return f"<{self._figures}: {_shortened(self)}>"

    @property
    def _figures(self) -> str:
        length = "" if self.acceptance_length is None else f" ({self.acceptance_length:.2f} a round)"
        return f"{len(self.tokens)} tokens in {self.rounds} rounds{length}, finish: {self.finish}"

    def _repr_html_(self) -> str:
        text = str(self.tokens) if self.text is None else self.text
        return f"<pre style='white-space:pre-wrap'>{html.escape(text)}</pre><small>{html.escape(self._figures)}</small>"


class Generations(list[Generation]):
    """A batch's results, in the order of its prompts."""

    def __init__(self, rows: Iterable[Generation] = ()):
        super().__init__(rows)

    def __repr__(self) -> str:
        return "\n".join(f"[{index}] {row!r}" for index, row in enumerate(self)) or "no generations"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("", "text", "tokens", "rounds", "tokens a round", "finish"))
        rows = "".join(f"<tr>{_cells(index, row)}</tr>" for index, row in enumerate(self))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


class NotFiniteError(ArithmeticError):
    """The target's logits were NaN or infinite; `generations` holds what was emitted before."""

    def __init__(self, row: int, position: int, generations: list[Generation]):
        self.generations = generations
        super().__init__(
            f"target logits of row {row} are not finite at position {position}: "
            "check the checkpoint's weights, or use a wider dtype (--dtype float32)"
        )


def _cells(index: int, row: Generation) -> str:
    length = "" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
    text = html.escape(str(row.tokens) if row.text is None else row.text)
    left = f"<td>{index}</td><td style='text-align:left;white-space:pre-wrap'>{text}</td>"
    return left + "".join(f"<td>{value}</td>" for value in (len(row.tokens), row.rounds, length, row.finish))


def _shortened(row: Generation) -> str:
    text = str(row.tokens) if row.text is None else repr(row.text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
