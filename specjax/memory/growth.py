"""How an account and the traffic grow with batch, context and window, and hence what fits into a device.

Figures are traced at a few sizes and laid through them exactly: a straight line, or a parabola where a third
trace does not lie on the line (a tree's mask, attention over the text itself). No rule says which component
grows with what. Where another trace does not lie on the parabola either, every size is traced by itself, and
so are small contexts, where a component is the largest of several arrays and changes from one to another.

Is that worth its lines? A trace takes 0.2 to 0.6 s (8B and 70B, on a CPU). `specjax plan` asks for some 1,000 sizes,
a sweep for 400, a table of `specjax memory` for 160: 1 to 5 minutes, and with this 12 s to 25 s.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from specjax.memory.account import LARGEST_BATCH, Account
from specjax.memory.jaxpr_traffic import Traffic, traffic
from specjax.memory.round_trace import draft_shapes, trace_round
from specjax.memory.strategy import Strategy
from specjax.mesh import Layout

Figures = Mapping[Any, int]
Axes = tuple[tuple[int, ...], ...]

SMALLEST_CONTEXT, SMALLEST_SHARE = 1024, 8
"""Of those that are laid through, at most the eighth part of the longest: below, each context is traced."""
FAR = 64
"""What is laid through is checked by a trace at so many times the smallest batch, between the other sizes."""


@dataclass(frozen=True)
class Growth:
    """A strategy on one device of a mesh, at any batch, context and (of `windows`' range) window."""

    strategy: Strategy
    layout: Layout
    windows: tuple[int, ...] = ()  # traced ones; empty: the strategy's own only

    def account(self, batch: int, context: int, window: int = 0) -> Account:
        """The account at other sizes; `window` 0 is the strategy's own."""
        sides: dict[str, list[Any]] = {"own": [], "none": []}
        for (side, part), size in self._figures(self._account_at, batch, context, window).items():
            sides[side].append(dataclasses.replace(part, bytes=size))
        return Account(tuple(sides["own"]), tuple(sides["none"]))

    def traffic(self, batch: int, context: int, window: int = 0) -> Traffic:
        """What a round moves and computes, at other sizes."""
        return Traffic(dict(self._figures(self._traffic_at, batch, context, window)))

    @functools.cache  # noqa: B019  (a frozen value, of which there are few)
    def needed_bytes(self, batch: int, context: int, window: int = 0) -> int:
        """What a device must have, at another batch and context."""
        return self.account(batch, context, window).needed_bytes

    def largest_batch(self, limit_bytes: int, context: int, window: int = 0) -> int:
        """The largest batch that fits; 0 if none does. A batch is a multiple of the mesh's `data`."""
        step = self.layout.data
        return step * largest(lambda n: self.needed_bytes(n * step, context, window) <= limit_bytes, LARGEST_BATCH)

    def longest_context(self, limit_bytes: int, batch: int, window: int = 0) -> int:
        """The longest context that fits, at most the model's; 0 if none does that the window fits into."""
        shortest = self.nodes(window) + 1
        found = largest(lambda n: n < shortest or self.needed_bytes(batch, n, window) <= limit_bytes, self.longest)
        return found if found >= shortest else 0

    @functools.cached_property
    def longest(self) -> int:
        """The model's own context."""
        return self.strategy.model.config.context_length

    @functools.cached_property
    def window(self) -> int:
        """The strategy's own window."""
        return self.strategy.shapes()[0].drafter.num_speculative_tokens

    def nodes(self, window: int = 0) -> int:
        """Nodes that a round drafts."""
        return self._draft(window or self.window)[0]

    def depth(self, window: int = 0) -> int:
        """The most tokens of a draft that can be accepted: a tree's depth, or all of a chain."""
        return self._draft(window or self.window)[1]

    @functools.cache  # noqa: B019
    def _draft(self, window: int) -> tuple[int, int]:
        strategy = self._at(self.layout.data, self.longest, window)
        draft = draft_shapes(*strategy.shapes(), **strategy.options())
        nodes = draft.tokens.shape[1]
        return nodes, nodes if draft.depth is None else draft.depth

    @functools.cached_property
    def axes(self) -> Axes | None:
        """Sizes that are laid through, two or three of each kind; `None` where that would not be exact."""
        step, windows = self.layout.data, self.windows or (self.window,)
        smallest = max(min(SMALLEST_CONTEXT, self.longest // SMALLEST_SHARE), max(windows) + 1)
        if smallest >= self.longest:
            return None
        contexts, windows = (smallest, self.longest), (min(windows), max(windows))
        for parts in ((0, 1), (0, 0.5, 1)):  # a line, a parabola
            axes = (step, 2 * step), _between(contexts, parts), _between(windows, parts)
            sizes = FAR * step, *(_between(ends, (parts[1] / 2,))[0] for ends in (contexts, windows))
            if _laid_through(axes, self._account_at, sizes) == self._account_at(*sizes):
                return axes
        return None

    def _figures(self, measure: Callable[..., Figures], batch: int, context: int, window: int) -> Figures:
        sizes = batch, context, window or self.window
        if self.axes is None:
            return measure(*sizes)
        batches, contexts, _ = self.axes
        axes = self.axes if context >= contexts[0] else (batches, (context,), (sizes[2],))
        return _laid_through(axes, measure, sizes)

    @functools.cache  # noqa: B019
    def _account_at(self, batch: int, context: int, window: int) -> Figures:
        found = self._at(batch, context, window).account(self.layout)
        sides = (("own", found.components), ("none", found.baseline))
        return {(side, dataclasses.replace(part, bytes=0)): part.bytes for side, parts in sides for part in parts}

    @functools.cache  # noqa: B019
    def _traffic_at(self, batch: int, context: int, window: int) -> Figures:
        return traffic_of(self._at(batch, context, window), self.layout).counts

    def _at(self, batch: int, context: int, window: int) -> Strategy:
        return dataclasses.replace(self.strategy, batch=batch, context=context, window=window)


@functools.lru_cache(maxsize=64)
def grow(
    target: str, drafter: str, dtype: str, cache_dtype: str, layout: Layout, platform: str, windows: tuple[int, ...]
) -> Growth:
    """A strategy at any size, traced once however often it is asked for."""
    return Growth(Strategy(target, drafter, 1, 1, 0, dtype, cache_dtype, platform), layout, windows)


def traffic_of(strategy: Strategy, layout: Layout) -> Traffic:
    """Trace one strategy's round at its own sizes."""
    return traffic(trace_round(*strategy.shapes(), **strategy.options()), layout, strategy.platform)


def largest(fits: Callable[[int], Any], maximum: int) -> int:
    """The largest number up to `maximum` for which `fits` holds: it holds up to some number and not beyond."""
    low, high = 0, maximum
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _laid_through(axes: Axes, measure: Callable[..., Figures], sizes: tuple[int, ...]) -> dict[Any, int]:
    """Figures at `sizes`, one an axis: Lagrange's polynomial through what is measured at every point of a grid."""
    bases = [_basis(axis, size) for axis, size in zip(axes, sizes, strict=True)]
    result: dict[Any, Fraction] = {}
    for point in itertools.product(*axes):
        factor = Fraction(1)
        for basis, at in zip(bases, point, strict=True):
            factor *= basis[at]
        if factor:
            for name, value in measure(*point).items():
                result[name] = result.get(name, Fraction(0)) + factor * value
    return {name: int(value) for name, value in result.items()}


@functools.lru_cache(maxsize=4096)
def _basis(axis: tuple[int, ...], at: int) -> dict[int, Fraction]:
    """The value at a point of Lagrange's basis polynomial of each node."""
    basis = dict.fromkeys(axis, Fraction(1))
    for node, other in itertools.permutations(axis, 2):
        basis[node] *= Fraction(at - other, node - other)
    return basis


def _between(ends: tuple[int, int], parts: tuple[float, ...]) -> tuple[int, ...]:
    """Sizes at parts of the way from one end to the other, once each."""
    low, high = ends
    return tuple(sorted({round(low + part * (high - low)) for part in parts}))
