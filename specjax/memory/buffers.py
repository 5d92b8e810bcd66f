"""Buffers that live within a round: probabilities, logits, attention scores, dequantised weights.

Found by walking the traced functions. What a compiler fuses away is not here: elementwise results, for
one. What it must write to memory is: products of matrices, probabilities that two phases read, on a CPU the
weights that it converts before a product, and on a TPU a padded copy of an embedding of odd width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from specjax import cache as kv
from specjax import decode
from specjax.memory.buffer_assignment import TABLE_BYTES
from specjax.memory.round_trace import Round

PHASES = ("draft", "verify", "commit")
"""Of a round. What is held while a prompt is read only, in the phase `prefill`, is named and stands in no sum."""

TABLES = 5
"""Tuples whose addresses a TPU's compiler keeps in HBM, for each product with a weight: 2 to 9 in the programs of
`experiments/memory_table.md`, in 16 KiB each (`specjax.memory.buffer_assignment.TABLE_BYTES`): most of what it adds."""


@dataclass(frozen=True)
class Buffer:
    """An array that is there for a while, or `None` in a round that has none."""

    name: str
    kind: str  # as `specjax.mesh.Layout` splits it
    array: Any
    phases: tuple[str, ...]
    count: int = 1


@dataclass(frozen=True)
class Products:
    """Results of a traced function that a compiler must write to memory; `None` where there are none."""

    scores: Any  # the largest product of two activations: attention
    features: Any  # the largest product with a weight on its left (the decoder's own), the vocabulary's aside
    activations: Any  # the same with one on its right, which no rule splits
    converted: Any  # the largest weight that is read in another dtype than it is kept in
    repeated: Any  # all weights that are converted inside of a loop, as one array: they don't change within it
    looked_up: Any  # the weight that rows are taken from
    count: int  # products with a weight


def buffers(traced: Round, backend: str) -> Iterator[Buffer]:
    """The buffers of a round on a backend (`cpu`, `gpu` or `tpu`), always the same names in the same order."""
    held = (traced.params, traced.drafter_params)
    weights = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(held) if leaf.ndim == 2}
    drafting, verifying = (
        _products(jaxpr, weights, traced.vocabulary_sizes) for jaxpr in (traced.drafting, traced.verifying)
    )
    (batch, nodes), vocab = traced.draft.tokens.shape, traced.program.model.vocab_size
    probs = jax.ShapeDtypeStruct((batch, nodes + 1, vocab), jnp.float32)
    mask = None if traced.draft.parents is None else jax.ShapeDtypeStruct((batch, nodes + 1, nodes + 1), jnp.bool)
    taps = len(traced.program.drafter.tapped_layers(traced.program.model))
    for name, rows, held_in in (
        ("tapped hidden states, a round's", nodes + 1, ("verify", "commit")),
        ("tapped hidden states, a prompt's chunk", decode.PREFILL_CHUNK, ("prefill",)),
    ):
        tap = jax.ShapeDtypeStruct((batch, rows, traced.program.model.hidden_size), traced.state.cache.dtype)
        yield Buffer(name, "hidden", tap if taps else None, held_in, taps)
    yield Buffer("draft probabilities", "probs", traced.draft.log_q, ("draft", "verify"))
    yield Buffer("verification logits", "probs", probs, ("verify",))
    yield Buffer("target probabilities", "probs", probs, ("verify",))
    yield Buffer("tree mask", "mask", mask, ("verify",))
    bonus = jax.ShapeDtypeStruct((batch, 1, vocab), jnp.float32)
    yield Buffer("bonus token's probabilities", "probs", bonus, ("commit",))
    for phase, found in (("draft", drafting), ("verify", verifying)):
        yield Buffer(f"attention scores, {phase}", "scores", found.scores, (phase,), 2)  # scores, and their softmax
        yield Buffer(f"features, {phase}", "features", found.features, (phase,))
        yield Buffer(f"activations, {phase}", "activations", found.activations, (phase,))
        if backend == "cpu":
            phases = PHASES if found.repeated else (phase,)
            yield Buffer(f"dequantised weights, {phase}", "dequantised", found.repeated or found.converted, phases)
    if backend == "cpu":
        yield Buffer("float32 copies", "copies", _widened((*held, traced.state)), PHASES)
    if backend == "tpu":
        tables = jax.ShapeDtypeStruct((TABLES * TABLE_BYTES * (drafting.count + verifying.count),), jnp.uint8)
        yield Buffer("address tables, estimated", "tables", tables, PHASES)
        own = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(traced.drafter_params)}
        for whose, table in (("target", verifying.looked_up), ("drafter", drafting.looked_up)):
            if table is not None and (whose == "target" or (table.shape, table.dtype) in own):
                yield Buffer(f"embedding, padded, {whose}", "dequantised", _padded(table), PHASES)


def _products(jaxpr: Any, weights: set[Any], vocab: frozenset[int]) -> Products:
    found: dict[str, list[Any]] = defaultdict(list)
    count = 0
    for equation, looped in _equations(jaxpr, False):
        operands, name = [variable.aval for variable in equation.invars], equation.primitive.name
        if name == "dot_general":
            matrices = [operand for operand in operands if operand.ndim == 2]
            count += bool(matrices)
            if all(operand.ndim > 2 for operand in operands):
                found["scores"].append(equation.outvars[0].aval)
            elif all(vocab.isdisjoint(matrix.shape) for matrix in matrices):
                found["features" if operands[0].ndim == 2 else "activations"].append(equation.outvars[0].aval)
        elif name in ("gather", "convert_element_type") and (operands[0].shape, operands[0].dtype) in weights:
            if name == "gather":
                found["looked_up"].append(operands[0])
                continue
            found["converted"].append(equation.outvars[0].aval)
            if looped:
                found["repeated"].append(equation.outvars[0].aval)
    largest = {name: _biggest(found[name]) for name in ("scores", "features", "activations", "converted", "looked_up")}
    return Products(**largest, repeated=_together(found["repeated"], largest["converted"]), count=count)


def _together(arrays: list[Any], like: Any) -> Any:
    """All arrays as one."""
    return jax.ShapeDtypeStruct((sum(int(np.prod(leaf.shape)) for leaf in arrays),), like.dtype) if arrays else None


def _widened(tree: Any) -> Any:
    """All 16-bit floats as one float32 array: a CPU multiplies in float32, and widens what does not change once."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype in (jnp.bfloat16, jnp.float16)]
    return _together(leaves, jax.ShapeDtypeStruct((), jnp.float32))


def _padded(matrix: Any) -> Any:
    """A TPU stores a matrix of odd width by columns, without padding, and takes rows from a padded copy by rows."""
    rows, width = matrix.shape
    padded = kv.padded(width, kv.LANES["tpu"])
    return jax.ShapeDtypeStruct((rows, padded), matrix.dtype) if padded > width else None


def _biggest(arrays: list[Any]) -> Any:
    return max(arrays, key=lambda array: int(np.prod(array.shape)) * array.dtype.itemsize, default=None)


def _equations(jaxpr: Any, looped: bool) -> Iterator[tuple[Any, bool]]:
    """All equations, with whether they stand inside of a loop."""
    for equation in jaxpr.eqns:
        yield equation, looped
        within = looped or equation.primitive.name in ("while", "scan")
        for parameter in equation.params.values():
            for value in parameter if isinstance(parameter, tuple | list) else (parameter,):  # a `cond` has branches
                if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
                    yield from _equations(value.jaxpr if isinstance(value, core.ClosedJaxpr) else value, within)
