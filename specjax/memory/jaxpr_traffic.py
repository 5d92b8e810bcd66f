"""What a round reads, writes and computes, from the traced functions: nothing is asked of the drafter's name.

The jaxpr of both halves of a round is walked with every weight and cache labelled where it comes in. A
product that meets a labelled array reads it, a gather reads what it takes, a scatter writes its updates; a
loop multiplies by its trip count. Activations stay on the chip; what is written and read again:

    laws       every product with the vocabulary, and each law that two phases read: once each way
    scores     what goes into and comes out of a product with a cache: once each way
    rollback   nothing: a length is kept

All slots of a cache are read, as masked attention does. Bytes and operations are those of one device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from specjax import decode
from specjax.memory.account import is_cache, nbytes
from specjax.memory.jaxpr_walk import Origin, Walk, size_of
from specjax.memory.round_trace import Weights, vocabulary_sizes
from specjax.mesh import Layout

PHASES = ("draft", "verify")
PARTS = (
    "target weights", "drafter weights", "target KV", "drafter KV", "attention scores", "law buffers",
    "window write", "tree commit", "rollback", "state", "converted weights", "exchange",
)  # fmt: skip
FIELDS = ("read", "written", "flop")


@dataclass(frozen=True)
class Traffic:
    """Bytes and operations a round, by `(phase, part, field)`; `field` is one of FIELDS.

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


def traffic(
    program: decode.Program, params: Weights, drafter_params: Weights, state: Any, layout: Layout, backend: str
) -> Traffic:
    """Trace a round from shapes and count.

    Args:
      state: from `specjax.memory.round_trace.state_shapes`.
      backend: `cpu`, `gpu` or `tpu`; a CPU converts weights in memory.
    """
    tally: Counter[tuple[str, str, str]] = Counter()
    vocab, loops = program.model.vocab_size, max(1, program.drafter.num_speculative_tokens)
    weights = _labels(layout, "target weights", "weights", params)
    own = _labels(layout, "drafter weights", "weights", drafter_params)
    carried = [label for field in dataclasses.fields(state) for label in _held(layout, field.name, state)]
    drafting = Walk("draft", layout, vocab, vocabulary_sizes(program.model), loops, backend, tally)
    propose = functools.partial(decode.propose, program)
    jaxpr, draft = jax.make_jaxpr(propose, return_shape=True)(params, drafter_params, state)
    drafting.run(jaxpr.jaxpr, [*weights, *own, *carried], 1)

    verifying = replace(drafting, phase="verify")
    jaxpr = jax.make_jaxpr(functools.partial(decode.settle, program))(params, state, draft)
    proposed = [
        label
        for field in dataclasses.fields(draft)
        if field.name != "depth"  # static
        for label in _held(layout, field.name, draft)
    ]
    verifying.run(jaxpr.jaxpr, [*weights, *carried, *proposed], 1)
    batch, nodes = draft.tokens.shape
    if draft.log_q is not None:
        drafting.laws(int(np.prod(draft.log_q.shape)), ("written",))
        verifying.laws(int(np.prod(draft.log_q.shape)), ("read",))
    verifying.laws(batch * (nodes + 1) * vocab, ("read", "written"))  # the target's law
    return Traffic(dict(tally))


def _held(layout: Layout, name: str, owner: Any) -> list[Origin | None]:
    """Labels of one field of a `State` or a `Draft`."""
    tree = getattr(owner, name)
    if name == "log_q":  # counted by its size
        return [None for _ in jax.tree.leaves(tree)]
    if name in ("drafter", "state"):
        return [
            label
            for piece in jax.tree.leaves(tree, is_leaf=is_cache)
            for label in _labels(layout, *(("drafter KV", "kv") if is_cache(piece) else ("state", "state")), piece)
        ]
    return _labels(layout, *(("target KV", "kv") if name == "cache" else ("state", "state")), tree)


def _labels(layout: Layout, part: str, kind: str, tree: Any) -> list[Origin | None]:
    labels: list[Origin | None] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        whole = nbytes(kind, path, leaf)
        reduces = 1
        if kind == "weights" and leaf.ndim == 2:
            reduces = layout.parts(layout.spec(kind, path, leaf)[1])
        share = layout.size(kind, path, leaf) / max(1, whole)
        labels.append(Origin(part, whole // max(1, size_of(leaf)), share, kind == "kv", reduces))
    return labels
