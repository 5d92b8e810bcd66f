"""Buffers that live within a round: laws, logits, attention scores, dequantised weights.

Found by walking the traced functions. What a compiler fuses away is not here: elementwise results, for
one. What it must write to memory is: products of matrices, laws that two phases read, on a CPU the
weights that it converts before a product, and on a TPU a padded copy of an embedding of odd width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from specjax import cache as kv
from specjax import decode
from specjax.memory.buffer_assignment import TABLE_BYTES
from specjax.memory.round_trace import Weights, vocabulary_sizes

PHASES = ("draft", "verify", "commit")


TABLES = 5
"""Tuples whose addresses a TPU's compiler keeps in HBM, for each product with a weight: 2 to 9 in the programs of
`experiments/memory_table.md`, in 16 KiB each (`specjax.memory.buffer_assignment.TABLE_BYTES`): most of what it adds."""


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


Buffer = tuple[str, str, Any, int, tuple[str, ...]]
"""Name, kind (for `Size`), array or `None`, how many of it, phases."""


@dataclass(frozen=True)
class Round:
    """A traced round: the draft's shapes, and the buffers that live inside of it."""

    draft: Any  # a `Draft` of shapes
    buffers: tuple[Buffer, ...]


def trace(program: decode.Program, params: Weights, drafter_params: Weights, state: Any, backend: str) -> Round:
    """Trace a round's two halves."""
    weights = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((params, drafter_params)) if leaf.ndim == 2}
    vocab = vocabulary_sizes(program.model)
    propose = functools.partial(decode.propose, program)
    drafting, draft = _products(propose, (params, drafter_params, state), weights, vocab)
    verifying, _ = _products(functools.partial(decode.settle, program), (params, state, draft), weights, vocab)
    batch, nodes = draft.tokens.shape
    law = jax.ShapeDtypeStruct((batch, nodes + 1, program.model.vocab_size), jnp.float32)
    further = jax.ShapeDtypeStruct((batch, 1, program.model.vocab_size), jnp.float32)
    mask = None if draft.parents is None else jax.ShapeDtypeStruct((batch, nodes + 1, nodes + 1), jnp.bool)
    buffers: tuple[Buffer, ...] = (
        ("draft law", "law", draft.log_q, 1, ("draft", "verify")),
        ("verification logits", "law", law, 1, ("verify",)),
        ("target law", "law", law, 1, ("verify",)),
        ("tree mask", "mask", mask, 1, ("verify",)),
        ("further token's law", "law", further, 1, ("commit",)),
    )
    for phase, found in (("draft", drafting), ("verify", verifying)):
        buffers += (
            (f"attention scores, {phase}", "scores", found.scores, 2, (phase,)),  # scores, and their softmax
            (f"features, {phase}", "features", found.features, 1, (phase,)),
            (f"activations, {phase}", "activations", found.activations, 1, (phase,)),
        )
        if backend == "cpu":
            held = PHASES if found.repeated else (phase,)
            buffers += ((f"dequantised weights, {phase}", "dequantised", found.repeated or found.converted, 1, held),)
    if backend == "cpu":
        buffers += (("float32 copies", "copies", _widened((params, drafter_params, state)), 1, PHASES),)
    if backend == "tpu":
        tables = jax.ShapeDtypeStruct((TABLES * TABLE_BYTES * (drafting.count + verifying.count),), jnp.uint8)
        buffers += (("address tables, estimated", "tables", tables, 1, PHASES),)
        own = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(drafter_params)}
        for whose, found in (("target", verifying.looked_up), ("drafter", drafting.looked_up)):
            if found is not None and (whose == "target" or (found.shape, found.dtype) in own):
                buffers += ((f"embedding, padded, {whose}", "dequantised", _padded(found), 1, PHASES),)
    return Round(draft, buffers)


def _products(
    function: Callable[..., Any], arguments: tuple[Any, ...], weights: set[Any], vocab: frozenset[int]
) -> tuple[Products, Any]:
    jaxpr, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    scores: list[Any] = []
    features: list[Any] = []
    activations: list[Any] = []
    converted: list[Any] = []
    repeated: list[Any] = []
    looked_up: list[Any] = []
    count = 0
    for equation, looped in _equations(jaxpr.jaxpr, False):
        operands = [variable.aval for variable in equation.invars]
        if equation.primitive.name == "dot_general":
            count += any(operand.ndim == 2 for operand in operands)
            if all(operand.ndim > 2 for operand in operands):
                scores.append(equation.outvars[0].aval)
            elif not any(operand.ndim == 2 and not vocab.isdisjoint(operand.shape) for operand in operands):
                (features if operands[0].ndim == 2 else activations).append(equation.outvars[0].aval)
        elif equation.primitive.name == "gather" and (operands[0].shape, operands[0].dtype) in weights:
            looked_up.append(operands[0])
        elif equation.primitive.name == "convert_element_type" and (operands[0].shape, operands[0].dtype) in weights:
            converted.append(equation.outvars[0].aval)
            if looped:
                repeated.append(equation.outvars[0].aval)
    total = sum(int(np.prod(leaf.shape)) for leaf in repeated)
    whole = jax.ShapeDtypeStruct((total,), converted[0].dtype) if repeated else None
    found = Products(
        scores=_biggest(scores),
        features=_biggest(features),
        activations=_biggest(activations),
        converted=_biggest(converted),
        repeated=whole,
        looked_up=_biggest(looked_up),
        count=count,
    )
    return found, result


def _widened(tree: Any) -> Any:
    """All 16-bit floats as one float32 array: a CPU multiplies in float32, and widens what does not change once."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype in (jnp.bfloat16, jnp.float16)]
    return jax.ShapeDtypeStruct((sum(int(np.prod(leaf.shape)) for leaf in leaves),), jnp.float32) if leaves else None


def _padded(matrix: Any) -> Any:
    """A TPU stores a matrix of odd width by columns, without padding, and takes rows from a padded copy by rows."""
    rows, width = matrix.shape
    padded = kv.padded(width, kv.LANES["tpu"])
    return jax.ShapeDtypeStruct((rows, padded), matrix.dtype) if padded > width else None


def _biggest(arrays: list[Any]) -> Any:
    return max(arrays, key=lambda array: int(np.prod(array.shape)) * array.dtype.itemsize, default=None)


def _equations(jaxpr: Any, looped: bool) -> Iterator[tuple[Any, bool]]:
    """All equations, with whether they stand inside of a loop."""
    inner = (core.Jaxpr, core.ClosedJaxpr)
    for equation in jaxpr.eqns:
        yield equation, looped
        within = looped or equation.primitive.name in ("while", "scan")
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda node: isinstance(node, inner)):
            if isinstance(value, inner):
                yield from _equations(value.jaxpr if isinstance(value, core.ClosedJaxpr) else value, within)
