"""How an account grows with batch and context, and hence what fits into a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from specjax.memory.shapes import PHASES, Account, Component

_FIXED = ("target weights", "drafter weights", "dequantised weights")
_PER_ROW = ("draft law", "verification logits", "target law", "tree mask", "further token's law", "features")


@dataclass(frozen=True)
class Growth:
    """An account at one batch and context, and its bytes at others.

    Weights stay, laws and features grow with the batch, all else with batch x context. Of a drafter's own
    state the last is assumed too: for one that does not grow with the context that is too much.
    """

    account: Account
    batch: int
    context: int

    def needed_bytes(self, batch: int, context: int) -> int:
        """What a device must have, at another batch and context."""
        return max(
            sum(self._scaled(part, batch, context) for part in self.account.components if phase in part.phases)
            for phase in PHASES
        )

    def largest_batch(self, limit_bytes: int) -> int:
        """The largest batch that fits at this context; 0 if none does."""
        return _largest(lambda batch: self.needed_bytes(batch, self.context) <= limit_bytes)

    def longest_context(self, limit_bytes: int, maximum: int) -> int:
        """The longest context that fits at this batch, at most `maximum`; 0 if none does."""
        return min(maximum, _largest(lambda context: self.needed_bytes(self.batch, context) <= limit_bytes, maximum))

    def _scaled(self, part: Component, batch: int, context: int) -> int:
        if part.name.startswith(_FIXED):
            return part.bytes
        factor = Fraction(batch, self.batch)
        if not part.name.startswith(_PER_ROW):
            factor *= Fraction(context, self.context)
        return int(part.bytes * factor)


def _largest(fits: Callable[[int], bool], maximum: int = 2**30) -> int:
    """The largest number up to `maximum` for which `fits` holds: it holds up to some number and not beyond."""
    low, high = 0, maximum
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
