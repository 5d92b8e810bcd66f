"""The shapes that the parts of specjax hand to each other: no logic, only data and its meaning.

Axis letters, used in every annotation of the package:

    B  rows (sequences)      T  cache slots           S  query tokens of one forward pass
    K  drafted tokens        N  draft nodes           V  vocabulary
    L  layers                H  query heads           G  key/value heads
    D  width of the model    W  width of a head       R  rounds

    P  positions             E  end ids

`p` are the target's probabilities, `q` the drafter's; the prefix `log_` marks a logarithm. Units are part of a
name (`_bytes`, `_s`). Floating arrays of probabilities are float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

Params = PyTree[Array]
Keys = Key[Array, "B"]

_static = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """A KV cache, the target's or a drafter's own: one `(keys, values)` pair a layer. See `specjax.cache`."""

    layers: tuple[tuple[Float[Array, "B G T W"], Float[Array, "B G T W"]], ...]

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.layers[0][0].shape[2]

    @property
    def dtype(self) -> Any:
        """Of keys and values."""
        return self.layers[0][0].dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How probabilities are made from logits, a row at a time; all traced, so that no value recompiles."""

    temperature: Float[Array, "B"]  # 0 is the point mass on the largest logit
    top_k: Int[Array, "B"]  # 0 keeps all
    top_p: Float[Array, "B"]  # 1 keeps all
    min_p: Float[Array, "B"]  # 0 keeps all


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forward:
    """What one pass of a model returns."""

    hidden: Float[Array, "B S D"]  # residual stream after the last layer that ran, before the final norm
    taps: tuple[Float[Array, "B S D"], ...]  # residual stream after each layer that was asked for
    cache: Cache  # without layers where there was none


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

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, D."""

    def init_cache(self, batch: int, capacity: int, dtype: Any) -> Cache: ...

    def embed(self, params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Input embeddings; `forward` takes them in place of tokens."""

    def forward(
        self,
        params: Params,
        inputs: Int[Array, "B S"] | Float[Array, "B S D"],
        cache: Cache | None,
        start: Int[Array, "B"],
        *,
        positions: Int[Array, "B M"] | None = None,
        mask: Bool[Array, "S M"] | Bool[Array, "B S M"] | None = None,
        layers: tuple[int, int] | None = None,
        taps: tuple[int, ...] = (),
        documents: Int[Array, "B S"] | None = None,
    ) -> Forward:
        """Run a stack of layers over a window of tokens, embeddings or hidden states.

        Args:
          inputs: token ids, or what stands in the residual stream before the first layer that runs.
          cache: read below the window and written at slots `start .. start + S - 1`. `None`: whole sequences
            without a cache, causal, with a gradient.
          positions, mask: of the last M >= S slots that end with the window; what stands below them is visible.
            With M > S, levels of a tree that earlier passes wrote. By default the window is a chain.
          layers: the first layer that runs, counted from 0, and the one behind the last; all by default. Static.
          taps: layers whose output is returned too, counted from 1. Static.
          documents: without a cache, the document of each token: none sees another, positions begin at 0 in each.
        """

    def logits(self, params: Params, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Final norm and head."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompts:
    """What a batch starts from; all traced."""

    tokens: Int[Array, "B T"]
    length: Int[Array, "B"]  # of each prompt
    limit: Int[Array, "B"]  # length at which a row stops: its prompt's, and its budget of new tokens
    keys: Keys  # one a row, from which all of its randomness comes
    end_ids: Int[Array, "E"]  # padded with -1
    sampling: Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Target:
    """What a drafter may see of the target. Only `tokens[:, :length]` and slots `< length - 1` are real."""

    model: Model = field(metadata=_static)
    params: Params
    cache: Cache
    tokens: Int[Array, "B T"]  # committed tokens; anything may stand at and beyond `length`
    length: Int[Array, "B"]  # committed tokens a row; the last one is pending: not yet in the cache
    sampling: Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a tree in topological order (a parent stands before its children).

    `log_q[b, i]` are the very probabilities that node i was drawn with, after every filter and conditional on
    what was drawn before it, in float32. `None` says that every node is a point mass, which is exact for any
    proposer. `parents` names each node's parent, -1 for the pending token; `None` is a chain.
    """

    tokens: Int[Array, "B N"]
    log_q: Float[Array, "B N V"] | None
    cache: Cache  # the target's, handed back: slots >= length - 1 may have been written
    state: PyTree[Array]  # the drafter's own
    count: Int[Array, "B"] | None = None  # nodes that are real, the rest are ignored; None: all of them
    parents: Int[Array, "B N"] | Int[Array, "N"] | None = None
    depth: int | None = field(default=None, metadata=_static)  # longest path of the tree; at most N


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """What verification decided for each row."""

    path: Int[Array, "B K"]  # accepted nodes, root to leaf; -1 beyond `accepted`
    accepted: Int[Array, "B"]
    probs: Float[Array, "B V"]  # of the bonus token: the residual after a rejection, p otherwise
    tested: Int[Array, "B"]  # nodes that were put to the test
    overlap: Float[Array, "B"]  # sum over the tested nodes of sum_x min(p, q)
    bonus: Int[Array, "B"]  # the one token behind the accepted ones


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verified:
    """A round as a drafter may learn from it, rejected nodes included."""

    draft: Draft
    verdict: Verdict
    log_p: Float[Array, "B M V"]  # M = N + 1 rows: row 0 after the token that was pending, row i + 1 after node i


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """Committed tokens that the target has just read: a chunk of the prompt, or the accepted path of a round.

    Token i of row b stands at position `start[b] + i`, and is real for `i < count[b]`: no token behind has a
    meaning, nor have its hidden states. In a round the first one is the token that was pending.
    """

    target: Target  # as it is now; while the prompt is read, its last token counts as read, too
    tokens: Int[Array, "B S"]
    start: Int[Array, "B"]
    count: Int[Array, "B"]
    hidden: tuple[Float[Array, "B S D"], ...]  # one a layer of `Drafter.tapped_layers`
    verified: Verified | None = None  # of a round


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Text:
    """Committed text, whole, as training sees it: drafts begin behind the tokens at `positions`."""

    model: Model = field(metadata=_static)
    params: Params  # the target's
    tokens: Int[Array, "B S"]
    hidden: tuple[Float[Array, "B S D"], ...]  # one a layer of `Drafter.tapped_layers`
    positions: Int[Array, "B P"]  # of tokens that were pending when a draft began
    sampling: Sampling
    documents: Int[Array, "B S"] | None = None  # several in a row are kept apart


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
