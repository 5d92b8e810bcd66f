"""The contract of a drafter, the one that drafts nothing, and the helpers that most drafters are made of.

A drafter is a frozen dataclass: its fields are its configuration, it is equal by value and hashable, so
it is a static argument of `jit` and an equal one compiles nothing. It has three methods:

    params(key, model, target_params)   once       its own weights; `()` if it has none
    init(params, target)                a batch    its state, after the target's prefill
    propose(keys, params, state, target) a round   a `Draft`

Rules (tests/test_contract.py holds every drafter to them): the state keeps its tree, shapes and dtypes;
only `tokens[:, :length]` and cache slots `< length - 1` are read, only slots `>= length - 1` written;
there is no rollback: the length is the truth, and a drafter with a cache of its own feeds the last two
committed tokens again, so that a full acceptance leaves no hole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from specjax import sampling
from specjax.text import Tokenizer
from specjax.types import Cache, Draft, Keys, Model, Params, Target


@dataclass(frozen=True)
class Drafter:
    """Base of every drafter. Override `propose`, and `params` and `init` where there is something to hold."""

    num_speculative_tokens: int = 4
    checkpoint: str = ""  # a folder that training wrote (`specjax.weights.save_drafter`)

    min_speculative_tokens: ClassVar[int] = 1
    opens_models: ClassVar[bool] = False  # a checkpoint may also be a model, as a target's source names it
    label: ClassVar[str] = ""  # what a reader of a report must know, e.g. that weights are untrained

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < self.min_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens}: must be at least "
                f"{self.min_speculative_tokens}; use the drafter `none` to decode without speculation"
            )

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs `Target.hidden` holds, counted from 1."""
        return ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Files beside the code that decide what it drafts, such as weights: a run's manifest holds their hashes."""
        return ()

    def check(self, model: Model, tokenizer: Tokenizer | None = None) -> None:
        """Refuse a target that this drafter can't serve, before anything is computed."""

    def params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """The drafter's own weights: never the target's arrays, which reach it through `Target`."""
        return ()

    def init(self, params: Params, target: Target) -> PyTree[Array]:
        """The drafter's state for a batch whose prompts the target has read."""
        return ()

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Draft `num_speculative_tokens` for each row. Traced; `keys` are this round's draft keys."""
        raise NotImplementedError


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
        rows = target.length.shape[0]
        return Draft(jnp.zeros((rows, 0), jnp.int32), None, jnp.zeros((rows,), jnp.int32), target.cache, state)


def draft_chain(
    keys: Keys,
    target: Target,
    num_tokens: int,
    model: Model,
    params: Params,
    cache: Cache,
    *,
    reread: int = 1,
    num_layers: int | None = None,
) -> tuple[Int[Array, "B K"], Float[Array, "B K V"], Cache]:
    """Draft a chain autoregressively with `model` on `cache`, sampling as the target samples.

    Args:
      reread: last tokens that each step feeds: 1 on a cache that verification fills (the target's), 2 on
        one that only drafts fill, where the last accepted draft was never fed. One loop body serves all
        steps, so that the model is compiled once; feeding a token again writes the same values.
      num_layers: layers of `model` that run.

    Returns:
      tokens, the log-law that each was drawn from, and the cache with the drafts' keys and values.
    """
    batch, vocab = target.length.shape[0], target.model.vocab_size
    start = target.length - reread
    recent = jnp.take_along_axis(target.tokens, start[:, None] + jnp.arange(reread, dtype=jnp.int32)[None], 1)

    def body(step: Int[Array, ""], carry: Any) -> Any:
        tokens, laws, cache = carry
        window = jax.lax.dynamic_slice_in_dim(tokens, step, reread, 1)
        out = model.forward(params, window, cache, start + step, num_layers=num_layers)
        logits = model.logits(params, out.hidden[:, -1:])[..., :vocab]
        log_q = sampling.log_probs(logits, target.sampling)
        token = sampling.draw(sampling.fold(keys, step), log_q[:, 0])
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], step + reread, 1)
        return tokens, jax.lax.dynamic_update_slice_in_dim(laws, log_q, step, 1), out.cache

    tokens = jnp.concatenate([recent, jnp.zeros((batch, num_tokens), jnp.int32)], 1)
    laws = jnp.zeros((batch, num_tokens, vocab), jnp.float32)
    tokens, laws, cache = jax.lax.fori_loop(0, num_tokens, body, (tokens, laws, cache))
    return tokens[:, reread:], laws, cache
