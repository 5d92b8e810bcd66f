"""How an account grows with batch, context and window, and hence what fits into a device.

Figures are traced at a few sizes and laid through them exactly: a straight line, or a parabola where a third
trace does not lie on the line (a tree's mask, attention over the text itself). No rule says which component
grows with what. Where another trace does not lie on the parabola either, every size is traced by itself, and
so are small contexts, where a component is the largest of several arrays and changes from one to another.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax

from specjax import decode
from specjax.memory.account import LARGEST_BATCH, Account, Component
from specjax.memory.jaxpr_traffic import Traffic, traffic
from specjax.memory.round_trace import state_shapes, tracing
from specjax.memory.strategy import Strategy
from specjax.mesh import Layout

Figures = Mapping[Any, int]


@dataclass(frozen=True)
class Surface:
    """Named integers at points of a grid, and between and beyond them: Lagrange's polynomial through each."""

    axes: tuple[tuple[int, ...], ...]
    points: Mapping[tuple[int, ...], Figures]

    @classmethod
    def through(cls, axes: tuple[tuple[int, ...], ...], measure: Callable[..., Figures]) -> Surface:
        """The one through what is measured at every point of a grid."""
        return cls(axes, {sizes: measure(*sizes) for sizes in itertools.product(*axes)})

    def at(self, *sizes: int) -> dict[Any, int]:
        """The figures at other sizes, one an axis."""
        bases = [_basis(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        result: dict[Any, Fraction] = {}
        for corner in itertools.product(*(range(len(axis)) for axis in self.axes)):
            factor = Fraction(1)
            for basis, index in zip(bases, corner, strict=True):
                factor *= basis[index]
            if factor:
                figures = self.points[tuple(axis[index] for axis, index in zip(self.axes, corner, strict=True))]
                for name, value in figures.items():
                    result[name] = result.get(name, Fraction(0)) + factor * value
        return {name: int(value) for name, value in result.items()}


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
        figures = self._figures(self._account_at, batch, context, window)
        outline = self._outline

        def rebuild(side: str, parts: tuple[Component, ...]) -> tuple[Component, ...]:
            return tuple(dataclasses.replace(part, bytes=figures.get((side, part.name), 0)) for part in parts)

        return Account(rebuild("own", outline.components), rebuild("none", outline.baseline))

    def traffic(self, batch: int, context: int, window: int = 0) -> Traffic:
        """What a round moves and computes, at other sizes."""
        return Traffic(dict(self._figures(self._traffic_at, batch, context, window)))

    def needed_bytes(self, batch: int, context: int, window: int = 0) -> int:
        """What a device must have, at another batch and context."""
        return self.account(batch, context, window).needed_bytes

    def largest_batch(self, limit_bytes: int, context: int, window: int = 0) -> int:
        """The largest batch that fits; 0 if none does. A batch is a multiple of the mesh's `data`."""
        step = self.layout.data
        return step * largest(lambda n: self.needed_bytes(n * step, context, window) <= limit_bytes, LARGEST_BATCH)

    def longest_context(self, limit_bytes: int, batch: int, window: int = 0) -> int:
        """The longest context that fits, at most the model's; 0 if none does that the window fits into."""
        longest, shortest = self.strategy.model.config.context_length, self.nodes(window) + 1

        def fits(context: int) -> bool:
            return context < shortest or self.needed_bytes(batch, context, window) <= limit_bytes

        found = largest(fits, longest)
        return found if found >= shortest else 0

    @functools.cached_property
    def window(self) -> int:
        """The strategy's own window."""
        return self.strategy.shapes()[0].drafter.num_speculative_tokens

    def nodes(self, window: int = 0) -> int:
        """Nodes that a round drafts."""
        return int(self._draft(window or self.window).tokens.shape[1])

    def depth(self, window: int = 0) -> int:
        """The most tokens of a draft that can be accepted: a tree's depth, or all of a chain."""
        draft = self._draft(window or self.window)
        return int(draft.depth if draft.depth is not None else draft.tokens.shape[1])

    @functools.cache  # noqa: B019  (a frozen value, of which there are few)
    def _draft(self, window: int) -> Any:
        strategy = self._strategy(self.layout.data, self.strategy.model.config.context_length, window)
        program, params, own = strategy.shapes()
        with tracing(program):
            state = state_shapes(program, params, own, **strategy.options())
            return jax.eval_shape(functools.partial(decode.propose, program), params, own, state)

    @functools.cached_property
    def axes(self) -> tuple[tuple[int, ...], ...] | None:
        """Sizes that are laid through, two or three of each kind; `None` where that would not be exact."""
        longest = self.strategy.model.config.context_length
        windows = (min(self.windows), max(self.windows)) if self.windows else (self.window,) * 2
        batches = (self.layout.data, 2 * self.layout.data)
        contexts = (max(min(SMALLEST_CONTEXT, longest // SMALLEST_SHARE), windows[1] + 1), longest)
        if contexts[0] >= longest:
            return None
        ends = (batches, contexts, windows)
        for parts in ((0, 1), (0, 0.5, 1)):
            shares = ((0, 1), parts, parts)
            axes = tuple(
                tuple(sorted({round(low + part * (high - low)) for part in share}))
                for (low, high), share in zip(ends, shares, strict=True)
            )
            between = tuple(round(low + parts[1] / 2 * (high - low)) for low, high in (contexts, windows))
            if self._agrees(axes, (FAR * self.layout.data, *between)):
                return axes
        return None

    def _agrees(self, axes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> bool:
        """Whether what is laid through the traces of `axes` is what a trace at other sizes finds."""
        return Surface.through(axes, self._account_at).at(*sizes) == self._account_at(*sizes)

    def _figures(self, measure: Callable[[int, int, int], Figures], batch: int, context: int, window: int) -> Figures:
        window = window or self.window
        if self.axes is None:
            return measure(batch, context, window)
        if context < self.axes[1][0]:
            return Surface.through((self.axes[0], (context,), (window,)), measure).at(batch, context, window)
        return self._surface(measure).at(batch, context, window)

    @functools.cache  # noqa: B019
    def _surface(self, measure: Callable[[int, int, int], Figures]) -> Surface:
        assert self.axes is not None
        return Surface.through(self.axes, measure)

    @functools.cache  # noqa: B019
    def _account_at(self, batch: int, context: int, window: int) -> Figures:
        account = self._strategy(batch, context, window).account(self.layout.size)
        sides = (("own", account.components), ("none", account.baseline))
        return {(side, part.name): part.bytes for side, parts in sides for part in parts}

    @functools.cache  # noqa: B019
    def _traffic_at(self, batch: int, context: int, window: int) -> Figures:
        return traffic_of(self._strategy(batch, context, window), self.layout).counts

    def _strategy(self, batch: int, context: int, window: int) -> Strategy:
        return dataclasses.replace(self.strategy, batch=batch, context=context, window=window)

    @functools.cached_property
    def _outline(self) -> Account:
        sizes = (self.layout.data, self.strategy.model.config.context_length, max((*self.windows, self.window)))
        return self._strategy(*sizes).account(self.layout.size)


@functools.lru_cache(maxsize=64)
def grow(
    target: str, drafter: str, dtype: str, cache_dtype: str, layout: Layout, platform: str, windows: tuple[int, ...]
) -> Growth:
    """A strategy at any size, traced once however often it is asked for."""
    return Growth(Strategy(target, drafter, 1, 1, 0, dtype, cache_dtype, platform), layout, windows)


def traffic_of(strategy: Strategy, layout: Layout) -> Traffic:
    """Trace one strategy's round at its own sizes."""
    program, params, own = strategy.shapes()
    state = state_shapes(program, params, own, **strategy.options())
    return traffic(program, params, own, state, layout, strategy.platform)


def largest(fits: Callable[[int], Any], maximum: int) -> int:
    """The largest number up to `maximum` for which `fits` holds: it holds up to some number and not beyond."""
    low, high = 0, maximum
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _basis(nodes: Sequence[int], at: int) -> list[Fraction]:
    """Lagrange's basis polynomials at a point."""
    basis = []
    for i, node in enumerate(nodes):
        value = Fraction(1)
        for j, other in enumerate(nodes):
            if i != j:
                value *= Fraction(at - other, node - other)
        basis.append(value)
    return basis
