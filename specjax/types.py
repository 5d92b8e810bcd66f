"""The shapes that the parts of specjax hand to each other: no logic, only data and its meaning.

Axis letters, used in every annotation of the package:

    B  rows (sequences)      T  cache slots           S  query tokens of one forward pass
    K  drafted tokens        N  draft nodes           V  vocabulary
    L  layers                H  query heads           G  key/value heads
    D  width of the model    W  width of a head       R  rounds

`p` is the target's law, `q` the drafter's; the prefix `log_` marks a logarithm. Units are part of a
name (`_bytes`, `_s`). Floating arrays that hold a law are float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

Params = PyTree[Array]
Keys = Key[Array, "B"]
Cache = tuple[tuple[Float[Array, "B G T W"], Float[Array, "B G T W"]], ...]
"""One `(keys, values)` pair a layer. See `specjax.cache`."""

_static = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How a law is made from logits, a row at a time; all traced, so that no value recompiles."""

    temperature: Float[Array, "B"]  # 0 is the one-hot law of the largest logit
    top_k: Int[Array, "B"]  # 0 keeps all
    top_p: Float[Array, "B"]  # 1 keeps all
    min_p: Float[Array, "B"]  # 0 keeps all


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forward:
    """What one pass of a model returns."""

    hidden: Float[Array, "B S D"]  # residual stream after the last layer that ran, before the final norm
    taps: tuple[Float[Array, "B S D"], ...]  # residual stream after each layer that was asked for
    cache: Cache


@runtime_checkable
class Model(Protocol):
    """A decoder as specjax sees it: hashable and equal by value, its weights passed as arguments."""

    @property
    def vocab_size(self) -> int:
        """Ids that a token can have; columns of the logits beyond it are padding."""

    @property
    def context_length(self) -> int:
        """Positions that the model was made for."""

    @property
    def num_layers(self) -> int: ...

    def init_cache(self, batch: int, slots: int, dtype: Any) -> Cache: ...

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B S"],
        cache: Cache,
        start: Int[Array, "B"],
        *,
        depth: Int[Array, "S"] | Int[Array, "B S"] | None = None,
        mask: Bool[Array, "S S"] | Bool[Array, "B S S"] | None = None,
        num_layers: int | None = None,
        taps: tuple[int, ...] = (),
    ) -> Forward: ...

    def logits(self, params: Params, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Target:
    """What a drafter may see of the target. Only `tokens[:, :length]` and slots `< length - 1` are real."""

    model: Model = field(metadata=_static)
    params: Params
    cache: Cache
    tokens: Int[Array, "B T"]  # committed tokens; anything may stand at and beyond `length`
    length: Int[Array, "B"]  # committed tokens a row; the last one is pending: not yet in the cache
    hidden: tuple[Float[Array, "B 1 T D"], ...]  # one a layer of `Drafter.hidden_layers`, real below length - 1
    sampling: Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a tree in topological order (a parent stands before its children).

    `log_q[b, i]` is the very law that node i was drawn from, after every filter and conditional on what
    was drawn before it, in float32. `None` says that every node is a point mass, which is exact for any
    proposer. `parents` names each node's parent, -1 for the pending token; `None` is a chain.
    """

    tokens: Int[Array, "B N"]
    log_q: Float[Array, "B N V"] | None
    count: Int[Array, "B"]  # nodes that are real; the rest are ignored
    cache: Cache  # the target's, handed back: slots >= length - 1 may have been written
    state: PyTree[Array]  # the drafter's own, for the next round
    parents: Int[Array, "B N"] | Int[Array, "N"] | None = None
    depth: int | None = field(default=None, metadata=_static)  # longest path of the tree; at most N


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """What verification decided for each row."""

    path: Int[Array, "B K"]  # accepted nodes, root to leaf; -1 beyond `accepted`
    accepted: Int[Array, "B"]
    law: Float[Array, "B V"]  # of the one further token: the residual after a rejection, p otherwise
    tested: Int[Array, "B"]  # nodes that were put to the test
    overlap: Float[Array, "B"]  # sum over the tested nodes of sum_x min(p, q)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counts:
    """Raw counts, one entry a round: every ratio is computed from these, on the host (`specjax.evaluate.metrics`).

    A batch's are arrays on the device, one row's are numpy arrays of its rounds.
    """

    drafted: Int[Array | np.ndarray, "*B R"]  # nodes that could be accepted (real, in range, inside the budget)
    tested: Int[Array | np.ndarray, "*B R"]
    accepted: Int[Array | np.ndarray, "*B R"]  # accepted and emitted
    emitted: Int[Array | np.ndarray, "*B R"]
    overlap: Float[Array | np.ndarray, "*B R"]
    cut: Bool[Array | np.ndarray, "*B R"]  # shortened by end-of-sequence or by the token budget
