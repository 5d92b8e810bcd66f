"""Small subjects with known answers: table targets, and drafters that are right, wrong, silent or hostile.

They ship with the package, so that a researcher's own tests can use them.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from specjax import cache as kv
from specjax.drafter import Drafter, Wrapper, chain_log_probs, draft_chain, read_prompt
from specjax.model import Llama, ModelConfig
from specjax.model.positions import visible_slots, whole_text
from specjax.types import Cache, Draft, Forward, Keys, Model, Params, Seen, Target, Text


def tiny_config(**changes: Any) -> ModelConfig:
    """A decoder small enough for a test and complete enough to have grouped-query attention."""
    sizes: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_layers": 4, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "context_length": 256, "tied_embeddings": True,
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))


def tiny_model(seed: int = 0, sharpness: float = 3.0, **changes: Any) -> tuple[Llama, Params]:
    """A random decoder and its weights; matrices are scaled so that its laws are neither flat nor certain."""
    model = Llama(tiny_config(**changes))
    params = model.init(jax.random.key(seed))
    return model, jax.tree.map(lambda leaf: leaf * sharpness if leaf.ndim == 2 else leaf, params)


@dataclass(frozen=True)
class TableModel:
    """A target whose probabilities are a table on the last `order` tokens, read through the cache as a decoder would.

    Its cache holds token ids, so that a stale or misplaced slot changes them. `params` is the table
    of logits, `[V + 1] * order + [V]`; the extra index V stands for "before the text".
    """

    size: int
    order: int = 2
    context_length: int = 256

    @property
    def vocab_size(self) -> int:
        """Ids of the table."""
        return self.size

    @property
    def num_layers(self) -> int:
        """One cache layer."""
        return 1

    @property
    def hidden_size(self) -> int:
        """A hidden state is the context: the last `order` ids."""
        return self.order

    def init_cache(self, batch: int, capacity: int, dtype: Any) -> Cache:
        """One slot a token, one wide."""
        return kv.init_cache(1, batch, 1, capacity, 1, dtype)

    def embed(self, params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """The id itself, at the place of the last token of a context."""
        return jnp.pad(tokens.astype(jnp.float32)[..., None], ((0, 0), (0, 0), (self.order - 1, 0)))

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
        """`hidden` is the context of each query: the last `order` token ids that it sees."""
        ids = inputs if jnp.issubdtype(inputs.dtype, jnp.integer) else inputs[..., -1]
        first, slots = jnp.zeros_like(start), ids.astype(jnp.float32)
        if cache is not None:
            [(written, unused)] = cache.layers
            written = kv.write(written, ids.astype(written.dtype)[:, None, :, None], start)
            cache, first, slots = Cache(((written, unused),)), start, written[:, 0, :, 0]
        steps = jnp.arange(ids.shape[1], dtype=start.dtype)[None]
        if mask is None and documents is None:  # a chain: query i sees every slot up to its own
            last = (first[:, None] + steps)[..., None] + jnp.arange(1 - self.order, 1, dtype=start.dtype)[None, None]
            last = jnp.minimum(last, slots.shape[1] - 1)
        elif cache is None:
            last = self._last_seen(whole_text(start, ids.shape[1], documents, None)[1])
        else:
            at = start[:, None] + steps if positions is None else positions
            last = self._last_seen(visible_slots(cache.capacity, start, ids.shape[1], at, mask, None))
        found = jnp.take_along_axis(slots, jnp.maximum(last, 0).reshape(len(slots), -1), 1).reshape(last.shape)
        context = jnp.where(last >= 0, found, self.size).astype(jnp.float32)
        return Forward(context, tuple(context for _ in taps), cache)

    def _last_seen(self, visible: Bool[Array, "B S T"]) -> Int[Array, "B S O"]:
        """The last `order` slots that each query sees; -1 where there are fewer."""
        numbered = jnp.where(visible, jnp.arange(visible.shape[2], dtype=jnp.int32)[None, None], -1)
        padded = jnp.pad(numbered, ((0, 0), (0, 0), (self.order, 0)), constant_values=-1)
        return jax.lax.top_k(padded, self.order)[0][..., ::-1]

    def logits(self, params: Params, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """The table's row for each context."""
        context = jnp.clip(hidden.astype(jnp.int32), 0, self.size)
        return params["table"][tuple(context[..., i] for i in range(self.order))]


def table_params(laws: np.ndarray) -> Params:
    """Logits of a table of probabilities; zeros become -inf."""
    with np.errstate(divide="ignore"):
        return {"table": jnp.asarray(np.log(laws), jnp.float32)}


@dataclass(frozen=True)
class Self(Drafter):
    """The target drafts for itself, with a cache of its own: every draft must be accepted."""

    untrained: ClassVar[str] = ""

    def init_params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """A copy of the target's weights."""
        return jax.tree.map(jnp.copy, target_params)

    def init(self, params: Params, model: Model, batch: int, capacity: int, dtype: Any) -> PyTree[Array]:
        """A cache of its own."""
        return model.init_cache(batch, capacity, dtype)

    def observe(self, params: Params, state: Any, seen: Seen) -> PyTree[Array]:
        """Read the prompt as the target does."""
        return read_prompt(seen.target.model, params, state, seen)

    def scratch(self, state: PyTree[Array], length: Int[Array, "B"]) -> PyTree[Bool[Array, "..."]]:
        """The last two tokens are read again."""
        return kv.scratch(state, length - 2)

    def propose(self, keys: Keys, params: Params, state: Any, target: Target) -> Draft:
        """A chain drawn from the target's own probabilities."""
        tokens, log_q, cache = draft_chain(
            keys, target, self.num_speculative_tokens, target.model, params, state, reread=2
        )
        return Draft(tokens, log_q, target.cache, cache)

    def log_probs(self, params: Params, text: Text) -> Float[Array, "B P K V"]:
        """One pass."""
        return chain_log_probs(text, self.num_speculative_tokens, text.model, params)


@dataclass(frozen=True)
class Oracle(Drafter):
    """Point masses on a known continuation, wrong from position `accept[b]` on in row b.

    `params` is `{"tokens": [B, T], "accept": [B]}`: a row's whole greedy text, and how many drafts of
    each round are right.
    """

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """The known continuation, spoilt at one position."""
        steps = jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)[None]
        index = jnp.minimum(target.length[:, None] + steps, params["tokens"].shape[1] - 1)
        right = jnp.take_along_axis(params["tokens"], index, 1)
        wrong = (right + 1) % target.model.vocab_size
        tokens = jnp.where(steps == params["accept"][:, None], wrong, right)
        return Draft(tokens, None, target.cache, state)


@dataclass(frozen=True)
class Hostile(Drafter):
    """Always the full count: ids out of range, an end id and arbitrary tokens, whatever the budget."""

    end_id: int = 0

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Tokens that turn with the length, so that every kind stands at every position."""
        vocab = target.model.vocab_size
        menu = jnp.asarray([self.end_id, 1, vocab, 2, -1, 3, 2**31 - 1], jnp.int32)
        steps = jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)[None]
        tokens = menu[(target.length[:, None] * 3 + steps) % menu.shape[0]]
        return Draft(tokens, None, target.cache, state)


@dataclass(frozen=True)
class Silent(Drafter):
    """Proposes nothing, though it could."""

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Zeros that don't count."""
        tokens = jnp.zeros((target.length.shape[0], self.num_speculative_tokens), jnp.int32)
        return Draft(tokens, None, target.cache, state, jnp.zeros_like(target.length))


@dataclass(frozen=True)
class Poison(Wrapper):
    """Runs another drafter after filling everything stale with garbage: nothing may change."""

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """The inner drafter's proposal, given garbage beyond the committed text."""
        stale = kv.scratch(target.cache, target.length - 1)
        cache = jax.tree.map(lambda leaf, bad: jnp.where(bad, jnp.asarray(1e4, leaf.dtype), leaf), target.cache, stale)
        slot = jnp.arange(target.tokens.shape[1], dtype=jnp.int32)[None]
        tokens = jnp.where(slot < target.length[:, None], target.tokens, 7)
        return self.inner.propose(keys, params, state, dataclasses.replace(target, cache=cache, tokens=tokens))


@dataclass(frozen=True)
class Tree(Drafter):
    """Independent uniform draws on a fixed tree: siblings with replacement, each from the same law."""

    num_speculative_tokens: int = 0
    parents: tuple[int, ...] = (-1, -1, 0, 0, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_speculative_tokens", len(self.parents))

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Tokens uniform over the vocabulary."""
        vocab, nodes = target.model.vocab_size, len(self.parents)
        draw = functools.partial(jax.random.randint, shape=(nodes,), minval=0, maxval=vocab, dtype=jnp.int32)
        log_q = jnp.full((target.length.shape[0], nodes, vocab), -np.log(vocab), jnp.float32)
        parents = jnp.asarray(self.parents, jnp.int32)
        return Draft(jax.vmap(draw)(keys), log_q, target.cache, state, parents=parents)
