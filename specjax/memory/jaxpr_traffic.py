"""What a round reads, writes and computes, from the traced functions: nothing is asked of the drafter's name.

The jaxpr of both halves of a round is walked with every weight and cache labelled where it comes in. A
product that meets a labelled array reads it, a gather reads what it takes, a scatter writes its updates; a
loop multiplies by its trip count. Activations stay on the chip; what is written and read again:

    probs      every product with the vocabulary, and probabilities that two phases read: once each way
    scores     what goes into and comes out of a product with a cache: once each way
    rollback   nothing: a length is kept

All slots of a cache are read, as masked attention does. Bytes and operations are those of one device.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core

from specjax.memory.round_trace import Round
from specjax.mesh import Layout, nbytes
from specjax.types import Cache

PHASES = ("draft", "verify")
PARTS = (
    "target weights", "drafter weights", "target KV", "drafter KV", "attention scores", "probability buffers",
    "window write", "tree commit", "rollback", "state", "converted weights", "exchange",
)  # fmt: skip
_SAME = (
    "convert_element_type", "reshape", "transpose", "squeeze", "slice", "copy", "device_put",
    "optimization_barrier", "sharding_constraint", "rev",
)  # fmt: skip
"""Primitives whose result is the labelled array itself, or a part of it, read by whoever uses it."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and operations a round, by `(phase, part, field)`; `field` is `read`, `written` or `flop`.

    Of the part `exchange`, bytes go over the links to other devices, not to memory.
    """

    counts: dict[tuple[str, str, str], int]

    def of(self, phase: str, part: str, field: str) -> int:
        """One figure; 0 where there is none."""
        return self.counts.get((phase, part, field), 0)

    def bytes(self, phase: str, part: str) -> int:
        """Read and written."""
        return self.of(phase, part, "read") + self.of(phase, part, "written")

    def memory_bytes(self, phase: str) -> int:
        """To and from the device's memory."""
        return sum(self.bytes(phase, part) for part in PARTS if part != "exchange")

    def flop(self, phase: str) -> int:
        """Operations of products."""
        return sum(self.of(phase, part, "flop") for part in PARTS)

    def intensity(self, phase: str) -> float:
        """Operations a byte."""
        return self.flop(phase) / max(1, self.memory_bytes(phase))


def traffic(traced: Round, layout: Layout, backend: str) -> Traffic:
    """Count a traced round; a backend `cpu` converts weights in memory, `gpu` and `tpu` on the way."""
    loops = max(1, traced.program.drafter.num_speculative_tokens)
    drafting = Walk(
        "draft", layout, traced.program.model.vocab_size, traced.vocabulary_sizes, loops, backend, Counter()
    )
    verifying = replace(drafting, phase="verify")  # the same tally
    weights = _labels(layout, "target weights", "weights", traced.params)
    own = _labels(layout, "drafter weights", "weights", traced.drafter_params)
    carried, drafted = _held(layout, traced.state), _held(layout, traced.draft)
    drafting.run(traced.drafting, [*weights, *own, *carried], 1)
    verifying.run(traced.verifying, [*weights, *own, *carried, *drafted], 1)
    batch, nodes = traced.draft.tokens.shape
    if traced.draft.log_q is not None:
        drafting.probabilities(_size(traced.draft.log_q), ("written",))
        verifying.probabilities(_size(traced.draft.log_q), ("read",))
    verifying.probabilities(batch * (nodes + 1) * verifying.vocab, ("read", "written"))  # the target's
    return Traffic(dict(drafting.tally))


@dataclass(frozen=True)
class Origin:
    """Where an array came from, and how much of it one device holds."""

    part: str
    itemsize: int
    share: float = 1.0
    cache: bool = False
    reduces: int = 1  # devices over which a product with it must be summed
    moved: bool = False  # taken out of a cache by a gather


def _held(layout: Layout, owner: Any) -> list[Origin | None]:
    """Labels of the arrays of a `State` or a `Draft`."""
    labels: list[Origin | None] = []
    for field in dataclasses.fields(owner):
        for piece in jax.tree.leaves(getattr(owner, field.name), is_leaf=lambda node: isinstance(node, Cache)):
            if field.metadata.get("static"):
                continue
            if field.name == "log_q":  # counted by its size
                labels.append(None)
            elif isinstance(piece, Cache):
                labels += _labels(layout, "target KV" if field.name == "cache" else "drafter KV", "kv", piece)
            else:
                labels += _labels(layout, "state", "state", piece)
    return labels


def _labels(layout: Layout, part: str, kind: str, tree: Any) -> list[Origin | None]:
    labels: list[Origin | None] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        whole = nbytes(leaf)
        reduces = layout.parts(layout.spec(kind, path, leaf)[1]) if kind == "weights" and leaf.ndim == 2 else 1
        share = layout.size(kind, path, leaf) / max(1, whole)
        labels.append(Origin(part, whole // max(1, _size(leaf)), share, kind == "kv", reduces))
    return labels


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

    def add(self, part: str, amount: float, *fields: str) -> None:
        for field in fields:
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
            return [self._put(equation, found, found[0], times)]
        else:
            self._read(equation, found, times)
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

    def _read(self, equation: Any, found: list[Origin | None], times: int) -> None:
        for var, origin in zip(equation.invars, found, strict=True):
            if origin is not None and not origin.moved:
                self.add(origin.part, times * _size(var.aval) * origin.itemsize * origin.share, "read")

    def _convert(self, equation: Any, origin: Origin | None, times: int) -> None:
        """A CPU writes weights in the wider dtype and reads them back; other compilers convert on the way."""
        result = equation.outvars[0].aval
        if self.backend == "cpu" and origin is not None and result.dtype.itemsize > origin.itemsize:
            self.add("converted weights", times * nbytes(result) * origin.share, "read", "written")

    def _product(self, equation: Any, found: list[Origin | None], times: int) -> None:
        (contracted, _), _ = equation.params["dimension_numbers"]
        result = equation.outvars[0].aval
        inner = int(np.prod([equation.invars[0].aval.shape[axis] for axis in contracted], dtype=np.int64))
        main = next(origin for origin in found if origin is not None)
        self.add(main.part, 2 * times * _size(result) * inner / self.layout.devices, "flop")
        self._read(equation, found, times)
        if main.cache:
            others = [var.aval for var, origin in zip(equation.invars, found, strict=True) if origin is None]
            for array in (result, *others):
                size = times * nbytes(array) * main.share / self.layout.group
                self.add("attention scores", size, "read", "written")
        elif any(not self.heads.isdisjoint(var.aval.shape) for var in equation.invars):
            self.probabilities(times * _size(result), ("read", "written"))
        if main.reduces > 1:  # a ring's all-reduce: 2 (n - 1) / n of the result
            size = times * nbytes(result) / self.layout.data * 2 * (main.reduces - 1) / main.reduces
            self.add("exchange", size, "written")

    def probabilities(self, count: int, fields: tuple[str, ...]) -> None:
        """Float32 values over the vocabulary, which a mesh splits where it divides it."""
        model = self.layout.heads * self.layout.group
        self.add("probability buffers", count * 4 / (self.layout.data * (1 if self.vocab % model else model)), *fields)

    def _take(self, equation: Any, origin: Origin, times: int) -> Origin | None:
        part = "tree commit" if origin.cache and self.phase == "verify" else origin.part
        share = origin.share if origin.cache else 1 / self.layout.data  # rows of a table: every device takes its own
        self.add(part, times * _size(equation.outvars[0].aval) * origin.itemsize * share, "read")
        return replace(origin, moved=True) if origin.cache else None

    def _put(self, equation: Any, found: list[Origin | None], origin: Origin, times: int) -> Origin:
        position = 1 if equation.primitive.name == "dynamic_update_slice" else 2
        source, update = found[position], equation.invars[position]
        part = "window write" if origin.cache else "state"
        if self.phase == "verify" and source is not None and source.moved:
            part = "tree commit"
        self.add(part, times * _size(update.aval) * origin.itemsize * origin.share, "written")
        return origin


def _size(array: Any) -> int:
    """Elements of an array."""
    return int(np.prod(array.shape, dtype=np.int64))
