"""From raw counts to figures: acceptance length, rates by position, intervals. On the host, with numpy.

One entry of `Counts` is one round, which is one forward pass of the target. The prompt's own pass emits
the first token and belongs to no round. A ratio whose denominator is zero is `None`, never NaN.

A round that end-of-sequence or the budget shortened is counted as it was: its `emitted` and `accepted`
are what reached the output, so that the emitted tokens add up to the text. `cut_rounds` says how many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specjax.evaluate import table
from specjax.types import Counts

QUANTILES = (10, 50, 90)
RESAMPLES = 2000
CONFIDENCE = 0.95


class Counted(Protocol):
    """What was decoded from one prompt: a `Generation`, or a record of it."""

    @property
    def counts(self) -> Counts:
        """One entry a round."""


@dataclass(frozen=True, repr=False)
class Summary:
    """What the counts of several prompts say. Sums first, then ratios of them."""

    prompts: int  # those that had a round at all
    rounds: int
    drafted: int  # tokens that could be accepted
    tested: int  # of those, tokens that verification came to
    accepted: int  # of those, tokens that were accepted and emitted
    emitted: int  # accepted tokens and the bonus token of each round, less what was cut
    cut_rounds: int
    acceptance_length: float | None  # pooled: emitted / rounds, with the bonus token; 1 to K + 1
    acceptance_length_interval: tuple[float, float] | None  # of the pooled one; bootstrap over prompts
    acceptance_length_prompt_mean: float | None  # mean of the prompts' own acceptance lengths
    acceptance_length_quantiles: tuple[float, ...] | None  # of the same, at QUANTILES
    acceptance_rate: float | None  # accepted / drafted
    overlap: float | None  # alpha = sum of min(p, q), a tested token: the rate that an exact rule accepts at
    per_position: tuple[float, ...]  # accepted at a position, of the rounds that reached it
    per_position_marginal: tuple[float, ...]  # accepted at a position, of the rounds that drafted one there
    emitted_histogram: tuple[int, ...]  # entry n: rounds that emitted n tokens

    def as_json(self) -> dict[str, Any]:
        """Plain data; tuples become lists."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }

    def __repr__(self) -> str:
        return "\n".join(f"{label:32}{cell}" for label, [cell] in self._lines())

    def _repr_html_(self) -> str:
        return table.as_html([""], self._lines())

    def _lines(self) -> list[table.Line]:
        shown = table.acceptance(self.as_json())
        most = max(self.emitted_histogram, default=0)
        bars = [
            (f"  {tokens} tokens", [f"{rounds:6} {'#' * round(24 * rounds / most):24}"])
            for tokens, rounds in enumerate(self.emitted_histogram)
            if rounds or tokens
        ]
        return [*shown, ("rounds that emitted", [""]), *bars] if bars else shown


def summarize(results: Iterable[Counted], *, seed: int = 0) -> Summary:
    """Pool the counts of several prompts: of an engine's generations, or of a comparison's records.

    Args:
      seed: of the bootstrap's resampling; the same counts and seed give the same interval.
    """
    counts = [result.counts for result in results]
    rounds = np.asarray([len(prompt.emitted) for prompt in counts], np.int64)
    emitted = np.asarray([np.sum(prompt.emitted) for prompt in counts], np.int64)
    rounds, emitted = rounds[rounds > 0], emitted[rounds > 0]
    lengths = emitted / rounds
    drafted, tested, accepted = (_total(counts, name) for name in ("drafted", "tested", "accepted"))
    conditional, marginal = rates_by_position(counts)
    return Summary(
        prompts=len(rounds),
        rounds=int(rounds.sum()),
        drafted=drafted,
        tested=tested,
        accepted=accepted,
        emitted=int(emitted.sum()),
        cut_rounds=_total(counts, "cut"),
        acceptance_length=ratio(emitted.sum(), rounds.sum()),
        acceptance_length_interval=bootstrap(emitted, rounds, seed=seed),
        acceptance_length_prompt_mean=float(lengths.mean()) if len(lengths) else None,
        acceptance_length_quantiles=quantiles(lengths),
        acceptance_rate=ratio(accepted, drafted),
        overlap=ratio(sum(float(np.sum(prompt.overlap)) for prompt in counts), tested),
        per_position=conditional,
        per_position_marginal=marginal,
        emitted_histogram=histogram(counts),
    )


def rates_by_position(counts: Sequence[Counts]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Acceptance at each drafted position: of the rounds that reached it, and of those that drafted it.

    A position is reached if all before it were accepted and it was tested itself; tests behind an
    end-of-sequence decided nothing and are left out. Lists end with the last position that any round
    reached. Position i of a tree is its depth i; where siblings were tested, an accepted leaf looks as if the
    depth below it had been reached, and the rate of reached rounds is too small there.
    """
    drafted, tested, accepted, emitted = (
        np.concatenate([np.asarray(getattr(prompt, name), np.int64) for prompt in counts] or [np.zeros(0, np.int64)])
        for name in ("drafted", "tested", "accepted", "emitted")
    )
    reached = np.minimum(tested, emitted)
    conditional, marginal = [], []
    for position in range(int(reached.max(initial=0))):
        hits = int(np.sum(accepted > position))
        conditional.append(hits / int(np.sum(reached > position)))
        marginal.append(hits / int(np.sum(drafted > position)))
    return tuple(conditional), tuple(marginal)


def histogram(counts: Sequence[Counts]) -> tuple[int, ...]:
    """Rounds by the tokens that they emitted: entry n counts those with n."""
    emitted = [np.asarray(prompt.emitted, np.int64) for prompt in counts if len(prompt.emitted)]
    return tuple(np.bincount(np.concatenate(emitted)).tolist()) if emitted else ()


def bootstrap(
    numerators: Sequence[int] | np.ndarray, denominators: Sequence[int] | np.ndarray, *, seed: int
) -> tuple[float, float] | None:
    """Interval of sum / sum at CONFIDENCE, resampling prompts: tokens of one prompt are not independent.

    `None` for fewer than two prompts.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if len(above) < 2:
        return None
    chosen = np.random.default_rng(seed).integers(0, len(above), (RESAMPLES, len(above)))
    pooled = above[chosen].sum(1) / below[chosen].sum(1)
    low, high = np.quantile(pooled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def quantiles(values: Sequence[float] | np.ndarray) -> tuple[float, ...] | None:
    """The values at QUANTILES; `None` without values."""
    if len(values) == 0:
        return None
    return tuple(float(value) for value in np.percentile(np.asarray(values, np.float64), QUANTILES))


def ratio(numerator: Any, denominator: Any) -> float | None:
    """A quotient; `None` where there is nothing to divide by."""
    return float(numerator) / float(denominator) if denominator else None


def expected_speedup(
    acceptance_length: float | None, draft_s: float | None, verify_s: float | None, plain_round_s: float | None
) -> float | None:
    """What acceptance is worth once its cost is paid: tokens a round, by the time of a round against `none`'s.

    Leviathan et al. 2023, theorem 3.8, with measured times instead of a cost ratio.
    """
    if acceptance_length is None or draft_s is None or verify_s is None or plain_round_s is None:
        return None
    return ratio(acceptance_length * plain_round_s, draft_s + verify_s)


def _total(counts: Sequence[Counts], name: str) -> int:
    return int(sum(np.sum(getattr(prompt, name)) for prompt in counts))
