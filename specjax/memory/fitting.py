"""How an account grows with batch, context and window, and hence what fits into a device.

Every figure is traced at a few sizes and laid through them exactly: bytes are straight lines in batch and
context, and at most parabolas in the window (a tree's mask). No rule says which component grows with what.
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
from specjax.memory.shapes import Account, Component
from specjax.memory.sharding import Layout
from specjax.memory.state import state_shapes
from specjax.memory.strategies import Strategy
from specjax.memory.traffic import Traffic, traffic

Figures = Mapping[Any, int]


@dataclass(frozen=True)
class Surface:
    """Named integers at points of a grid, and between and beyond them: Lagrange's polynomial through each."""

    axes: tuple[tuple[int, ...], ...]
    points: Mapping[tuple[int, ...], Figures]

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


@dataclass(frozen=True)
class Growth:
    """A strategy on one device of a mesh, at any batch, context and (of `windows`' range) window."""

    strategy: Strategy
    layout: Layout
    windows: tuple[int, ...] = ()  # traced ones; empty: the strategy's own only

    def account(self, batch: int, context: int, window: int = 0) -> Account:
        """The account at other sizes; `window` 0 is the strategy's own."""
        figures = self._accounts.at(batch, context, window or self.axes[2][0])
        outline = self._outline

        def rebuild(side: str, parts: tuple[Component, ...]) -> tuple[Component, ...]:
            return tuple(dataclasses.replace(part, bytes=figures.get((side, part.name), 0)) for part in parts)

        return Account(rebuild("own", outline.components), rebuild("none", outline.baseline))

    def traffic(self, batch: int, context: int, window: int = 0) -> Traffic:
        """What a round moves and computes, at other sizes."""
        return Traffic(self._traffic.at(batch, context, window or self.axes[2][0]))

    def needed_bytes(self, batch: int, context: int, window: int = 0) -> int:
        """What a device must have, at another batch and context."""
        return self.account(batch, context, window).needed_bytes

    def largest_batch(self, limit_bytes: int, context: int, window: int = 0) -> int:
        """The largest batch that fits; 0 if none does. A batch is a multiple of the mesh's `data`."""
        step = self.layout.data
        return step * largest(lambda n: self.needed_bytes(n * step, context, window) <= limit_bytes)

    def longest_context(self, limit_bytes: int, batch: int, window: int = 0) -> int:
        """The longest context that fits, at most the model's; 0 if none does."""
        longest = self.strategy.model.config.context_length
        return largest(lambda context: self.needed_bytes(batch, context, window) <= limit_bytes, longest)

    @functools.cached_property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes that are traced: rows that the mesh can split, contexts that any window fits into."""
        program, _, _ = self.strategy.shapes()
        longest, own = program.model.context_length, program.drafter.num_speculative_tokens
        low, high = (min(self.windows), max(self.windows)) if self.windows else (own, own)
        windows = {low, high} if self._drafts_chains(low) else {low, (low + high) // 2, high}
        return (self.layout.data, 2 * self.layout.data), (longest // 2, longest), tuple(sorted(windows))

    def _drafts_chains(self, window: int) -> bool:
        """A chain's figures are straight lines in the window; a tree's mask is a square."""
        strategy = self._strategy(self.layout.data, self.strategy.model.context_length, window)
        program, params, own = strategy.shapes()
        state = state_shapes(program, params, own, **strategy.options())
        return jax.eval_shape(functools.partial(decode.propose, program), params, own, state).parents is None

    @functools.cached_property
    def _accounts(self) -> Surface:
        def figures(strategy: Strategy) -> Figures:
            account = strategy.account(self.layout.size)
            sides = (("own", account.components), ("none", account.baseline))
            return {(side, part.name): part.bytes for side, parts in sides for part in parts}

        return self._surface(figures)

    @functools.cached_property
    def _traffic(self) -> Surface:
        return self._surface(lambda strategy: traffic_of(strategy, self.layout).counts)

    def _surface(self, figures: Callable[[Strategy], Figures]) -> Surface:
        points = {sizes: figures(self._strategy(*sizes)) for sizes in itertools.product(*self.axes)}
        return Surface(self.axes, points)

    def _strategy(self, batch: int, context: int, window: int) -> Strategy:
        return dataclasses.replace(self.strategy, batch=batch, context=context, window=window)

    @functools.cached_property
    def _outline(self) -> Account:
        return self._strategy(*(axis[-1] for axis in self.axes)).account(self.layout.size)


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


def largest(fits: Callable[[int], Any], maximum: int = 2**30) -> int:
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
