"""The contract of a drafter, the one that drafts nothing, and the helpers that most drafters are made of.

A drafter is a frozen dataclass: its fields are its configuration, it is equal by value and hashable, so
it is a static argument of `jit` and an equal one compiles nothing. What it does, in the order of a text:

    init_params(key, model, target_params)  once      fresh or derived weights; `()` if it has none
    init(params, model, batch, ...)         a batch   an empty state
    observe(params, state, seen)            a chunk   the target has read a part of the prompt
    propose(keys, params, state, target)    a round   a `Draft`
    observe(params, state, seen)            a round   the target has read the accepted path
    log_probs(params, text)                 training  the arithmetic of `propose`, over whole texts at once

Rules (`specjax.testing.check_drafter` holds a drafter to them): the state keeps its tree, shapes and dtypes;
only `tokens[:, :length]` and cache slots `< length - 1` are read, only slots `>= length - 1` written, and of
the state only what `scratch` declares; there is no rollback: the length is the truth.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from specjax import cache as kv
from specjax import sampling, weights
from specjax.text import Tokenizer
from specjax.types import Cache, Draft, Keys, Model, Params, Seen, Target, Text


@dataclass(frozen=True)
class Drafter:
    """Base of every drafter. Override `propose`, and what else there is to hold or to learn from."""

    num_speculative_tokens: int = 4

    min_speculative_tokens: ClassVar[int] = 1
    checkpoint: ClassVar[str] = ""  # make it a field where weights can be trained: the folder that holds them
    untrained: ClassVar[str] = "untrained weights"  # what a reader must know of those that `init_params` makes

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < self.min_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens}: must be at least "
                f"{self.min_speculative_tokens}; use the drafter `none` to decode without speculation"
            )
        self.open_checkpoint()

    def open_checkpoint(self) -> None:
        """Read what the checkpoint says of itself, when the drafter is made: its weights are read by `params`.

        Raises:
          ValueError: it holds no trained drafter of this class.
        """
        if self.checkpoint:
            weights.read_card(self.checkpoint).check_kind(type(self))

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs `Seen.hidden` and `Text.hidden` hold, counted from 1."""
        return ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Files beside the code that decide what it drafts, such as weights: a run's manifest holds their hashes."""
        return weights.read_card(self.checkpoint).paths if self.checkpoint else ()

    @property
    def label(self) -> str:
        """What a reader of a report must know: that its weights are a stand-in."""
        own = type(self).init_params is not Drafter.init_params
        return self.untrained if own and not self.checkpoint else ""

    def check(self, model: Model, tokenizer: Tokenizer | None = None) -> None:
        """Refuse a target that this drafter can't serve, before anything is computed."""

    def init_params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """Weights of its own, fresh or derived from the target's: pure, and never the target's arrays."""
        return ()

    def params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """The weights that it drafts with: the checkpoint's, or those of `init_params`."""
        if not self.checkpoint:
            return self.init_params(key, model, target_params)
        like = jax.eval_shape(lambda key, given: self.init_params(key, model, given), key, target_params)
        return weights.load_drafter_params(self, like)

    def init(self, params: Params, model: Model, batch: int, capacity: int, dtype: Any) -> PyTree[Array]:
        """The state of a batch of which nothing was read: `capacity` slots a row, caches in `dtype`."""
        return ()

    def observe(self, params: Params, state: PyTree[Array], seen: Seen) -> PyTree[Array]:
        """Learn from what the target has read: each chunk of the prompt, then what a round has committed."""
        return state

    def scratch(self, state: PyTree[Array], length: Int[Array, "B"]) -> PyTree[Bool[Array, "..."]]:
        """What of the state may hold anything when it drafts: the slots of its caches that the target's leaves, too."""
        return kv.scratch(state, length - 1)

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Draft `num_speculative_tokens` for each row. Traced; `keys` are this round's draft keys."""
        raise NotImplementedError

    def log_probs(self, params: Params, text: Text) -> Float[Array, "B P K V"] | None:
        """The `log_q` of every draft that begins at `text.positions`, had it drafted the text itself.

        Pure and differentiable in `params`. A draft whose end lies beyond the text, or in another document, has
        rows without a meaning. `None`: a point mass, of which there is nothing to train.
        """
        return None


@dataclass(frozen=True)
class Nothing(Drafter):
    """Drafts nothing: plain decoding through the same round, the baseline of every speedup."""

    num_speculative_tokens: int = 0

    min_speculative_tokens: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.num_speculative_tokens != 0:
            raise ValueError(f"num_speculative_tokens={self.num_speculative_tokens}: the drafter `none` drafts none")

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """An empty draft."""
        return Draft(jnp.zeros((target.length.shape[0], 0), jnp.int32), None, target.cache, state)


@dataclass(frozen=True)
class Wrapper(Drafter):
    """Another drafter, unchanged: override what shall be different. It drafts as many tokens as the inner one."""

    num_speculative_tokens: int = 0
    inner: Drafter = dataclasses.field(default_factory=Nothing)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_speculative_tokens", self.inner.num_speculative_tokens)

    @property
    def checkpoint(self) -> str:  # type: ignore[override]
        return self.inner.checkpoint

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        return self.inner.tapped_layers

    @property
    def files(self) -> tuple[Path, ...]:
        return self.inner.files

    @property
    def label(self) -> str:
        return self.inner.label

    def check(self, model: Model, tokenizer: Tokenizer | None = None) -> None:
        self.inner.check(model, tokenizer)

    def init_params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        return self.inner.init_params(key, model, target_params)

    def params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        return self.inner.params(key, model, target_params)

    def init(self, params: Params, model: Model, batch: int, capacity: int, dtype: Any) -> PyTree[Array]:
        return self.inner.init(params, model, batch, capacity, dtype)

    def observe(self, params: Params, state: PyTree[Array], seen: Seen) -> PyTree[Array]:
        return self.inner.observe(params, state, seen)

    def scratch(self, state: PyTree[Array], length: Int[Array, "B"]) -> PyTree[Bool[Array, "..."]]:
        return self.inner.scratch(state, length)

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        return self.inner.propose(keys, params, state, target)

    def log_probs(self, params: Params, text: Text) -> Float[Array, "B P K V"] | None:
        return self.inner.log_probs(params, text)


def draft_chain(
    keys: Keys,
    target: Target,
    num_tokens: int,
    model: Model,
    params: Params,
    cache: Cache,
    *,
    reread: int = 1,
    layers: tuple[int, int] | None = None,
) -> tuple[Int[Array, "B K"], Float[Array, "B K V"], Cache]:
    """Draft a chain autoregressively with `model` on `cache`, sampling as the target samples.

    Args:
      reread: last tokens that each step feeds: 1 on a cache that verification fills (the target's), 2 on
        one that only drafts fill, where the last accepted draft was never fed. One loop body serves all
        steps, so that the model is compiled once; feeding a token again writes the same values.
      layers: of `model`, those that run: the first, and the one behind the last.

    Returns:
      tokens, the log-probabilities that each was drawn from, and the cache with the drafts' keys and values.
    """
    batch, vocab = target.length.shape[0], target.model.vocab_size
    start = target.length - reread
    recent = jnp.take_along_axis(target.tokens, start[:, None] + jnp.arange(reread, dtype=jnp.int32)[None], 1)

    def body(step: Int[Array, ""], carry: Any) -> Any:
        tokens, drawn_from, cache = carry
        window = jax.lax.dynamic_slice_in_dim(tokens, step, reread, 1)
        out = model.forward(params, window, cache, start + step, layers=layers)
        logits = model.logits(params, out.hidden[:, -1:])[..., :vocab]
        log_q = sampling.log_probs(logits, target.sampling)
        token = sampling.draw(sampling.fold(keys, step), log_q[:, 0])
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], step + reread, 1)
        return tokens, jax.lax.dynamic_update_slice_in_dim(drawn_from, log_q, step, 1), out.cache

    tokens = jnp.concatenate([recent, jnp.zeros((batch, num_tokens), jnp.int32)], 1)
    drawn_from = jnp.zeros((batch, num_tokens, vocab), jnp.float32)
    tokens, drawn_from, cache = jax.lax.fori_loop(0, num_tokens, body, (tokens, drawn_from, cache))
    return tokens[:, reread:], drawn_from, cache


def chain_log_probs(
    text: Text, num_tokens: int, model: Model, params: Params, *, layers: tuple[int, int] | None = None
) -> Float[Array, "B P K V"]:
    """`Drafter.log_probs` of one that drafts with `draft_chain`: one pass, and the rows where drafts stand."""
    start = jnp.zeros(text.tokens.shape[:1], jnp.int32)
    out = model.forward(params, text.tokens, None, start, layers=layers, documents=text.documents)
    (batch, starts), steps = text.positions.shape, jnp.arange(num_tokens, dtype=jnp.int32)
    index = (text.positions[:, :, None] + steps[None, None]).reshape(batch, starts * num_tokens)
    rows = jnp.take_along_axis(out.hidden, jnp.minimum(index, text.tokens.shape[1] - 1)[..., None], 1)
    logits = model.logits(params, rows)[..., : text.model.vocab_size]
    return sampling.log_probs(logits, text.sampling).reshape(batch, starts, num_tokens, -1)


def read_prompt(model: Model, params: Params, cache: Cache, seen: Seen) -> Cache:
    """`Drafter.observe` of one that drafts with `draft_chain` on a cache of its own: it reads the prompt as it comes.

    What a round commits it has read while it drafted, but for the last two tokens, which it reads again.
    """
    if seen.verified is not None:
        return cache
    read = model.forward(params, seen.tokens, cache, seen.start).cache
    assert read is not None
    return read
