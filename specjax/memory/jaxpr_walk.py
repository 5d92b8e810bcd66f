"""Walking a traced function with its arrays labelled: which of them each operation reads, writes and multiplies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend import core

from specjax.mesh import Layout

_SAME = (
    "convert_element_type", "reshape", "transpose", "squeeze", "slice", "copy", "device_put",
    "optimization_barrier", "sharding_constraint", "rev",
)  # fmt: skip
"""Primitives whose result is the labelled array itself, or a part of it, read by whoever uses it."""


@dataclass(frozen=True)
class Origin:
    """Where an array came from, and how much of it one device holds."""

    part: str
    itemsize: int
    share: float = 1.0
    cache: bool = False
    reduces: int = 1  # devices over which a product with it must be summed
    moved: bool = False  # taken out of a cache by a gather


@dataclass
class Walk:
    """One half of a round. `loops` stands for trip counts that are not known when tracing."""

    phase: str
    layout: Layout
    vocab: int
    heads: frozenset[int]  # sizes of the vocabulary's side of a matrix: padded or not
    loops: int
    backend: str
    tally: Counter[tuple[str, str, str]]

    def add(self, part: str, field: str, amount: float) -> None:
        self.tally[self.phase, part, field] += round(amount)

    def run(self, jaxpr: Any, origins: list[Origin | None], times: int) -> list[Origin | None]:
        """Walk a jaxpr that runs `times` times; returns the origins of its results."""
        known = {var: origin for var, origin in zip(jaxpr.invars, origins, strict=True) if origin is not None}
        for equation in jaxpr.eqns:
            found = [None if isinstance(var, core.Literal) else known.get(var) for var in equation.invars]
            results = self._equation(equation, found, times)
            known |= {var: new for var, new in zip(equation.outvars, results, strict=False) if new is not None}
        return [None if isinstance(var, core.Literal) else known.get(var) for var in jaxpr.outvars]

    def _equation(self, equation: Any, found: list[Origin | None], times: int) -> list[Origin | None]:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return self.run(params["jaxpr"].jaxpr, found, times * params["length"])[: params["num_carry"]]
        if name == "while":
            return self.run(params["body_jaxpr"].jaxpr, found[params["cond_nconsts"] :], times * self.loops)
        if name == "cond":
            return self._branches(params["branches"], found[1:], times)
        inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
        if inner is not None:
            return self.run(getattr(inner, "jaxpr", inner), found, times)
        if all(origin is None for origin in found):
            return []
        if name in _SAME:
            if name == "convert_element_type":
                self._convert(equation, found[0], times)
            return found
        if name == "dot_general":
            self._product(equation, found, times)
        elif name in ("gather", "dynamic_slice") and found[0] is not None:
            return [self._take(equation, found[0], times)]
        elif (name.startswith("scatter") or name == "dynamic_update_slice") and found[0] is not None:
            return [self._put(equation, found, times)]
        else:
            for var, origin in zip(equation.invars, found, strict=True):
                if origin is not None and not origin.moved:
                    self.add(origin.part, "read", times * _count(var) * origin.itemsize * origin.share)
        return []

    def _branches(self, branches: Any, found: list[Origin | None], times: int) -> list[Origin | None]:
        """The branch that costs most."""
        outcomes = []
        for branch in branches:
            trial = replace(self, tally=Counter())
            outcomes.append((trial.run(branch.jaxpr, found, times), trial.tally))
        origins, tally = max(outcomes, key=lambda outcome: sum(outcome[1].values()))
        self.tally.update(tally)
        return origins

    def _convert(self, equation: Any, origin: Origin | None, times: int) -> None:
        """A CPU writes weights in the wider dtype and reads them back; other compilers convert on the way."""
        result = equation.outvars[0]
        if self.backend == "cpu" and origin is not None and result.aval.dtype.itemsize > origin.itemsize:
            size = times * _count(result) * result.aval.dtype.itemsize * origin.share
            for field in ("read", "written"):
                self.add("converted weights", field, size)

    def _product(self, equation: Any, found: list[Origin | None], times: int) -> None:
        (contracted, _), _ = equation.params["dimension_numbers"]
        result = equation.outvars[0]
        inner = int(np.prod([equation.invars[0].aval.shape[axis] for axis in contracted], dtype=np.int64))
        main = next(origin for origin in found if origin is not None)
        self.add(main.part, "flop", 2 * times * _count(result) * inner / self.layout.devices)
        for var, origin in zip(equation.invars, found, strict=True):
            if origin is not None and not origin.moved:
                self.add(origin.part, "read", times * _count(var) * origin.itemsize * origin.share)
        if main.cache:
            share, others = main.share / self.layout.group, [result]
            others += [var for var, origin in zip(equation.invars, found, strict=True) if origin is None]
            for var in others:
                for field in ("read", "written"):
                    self.add("attention scores", field, times * _count(var) * var.aval.dtype.itemsize * share)
        elif any(not self.heads.isdisjoint(var.aval.shape) for var in equation.invars):
            self.laws(times * _count(result), ("read", "written"))
        if main.reduces > 1:  # a ring's all-reduce: 2 (n - 1) / n of the result
            size = _count(result) * result.aval.dtype.itemsize / self.layout.data
            self.add("exchange", "written", times * size * 2 * (main.reduces - 1) / main.reduces)

    def laws(self, count: int, fields: tuple[str, ...]) -> None:
        """Float32 values over the vocabulary."""
        share = 1 / (self.layout.data * (self.layout.devices // self.layout.data if self._splits() else 1))
        for field in fields:
            self.add("law buffers", field, count * 4 * share)

    def _splits(self) -> bool:
        return self.vocab % (self.layout.heads * self.layout.group) == 0

    def _take(self, equation: Any, origin: Origin, times: int) -> Origin | None:
        part = "tree commit" if origin.cache and self.phase == "verify" else origin.part
        share = origin.share if origin.cache else 1 / self.layout.data  # rows of a table: every device takes its own
        self.add(part, "read", times * _count(equation.outvars[0]) * origin.itemsize * share)
        return replace(origin, moved=True) if origin.cache else None

    def _put(self, equation: Any, found: list[Origin | None], times: int) -> Origin | None:
        origin = found[0]
        assert origin is not None
        position = 1 if equation.primitive.name == "dynamic_update_slice" else 2
        source, update = found[position], equation.invars[position]
        part = "state" if not origin.cache else "window write"
        if self.phase == "verify" and source is not None and source.moved:
            part = "tree commit"
        self.add(part, "written", times * _count(update) * origin.itemsize * origin.share)
        return origin


def size_of(leaf: Any) -> int:
    """Elements of an array."""
    return int(np.prod(leaf.shape, dtype=np.int64))


def _count(variable: Any) -> int:
    return size_of(variable.aval)
