"""Tiny targets whose laws are known exactly, chosen so that faults show.

A random instance may need 10^7 samples to betray a fault (block acceptance with the token residual: a
total variation of 0.0009 at the median instance); the two chosen here betray all known ones within
30,000. Target laws are Dirichlet, the drafter's are a mixture of the target's and of others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from specjax import sampling
from specjax.drafter import Drafter
from specjax.testing import TableModel, table_params, tiny_model
from specjax.types import Draft, Keys, Model, Params, Target

Laws = dict[tuple[int, ...], np.ndarray]

FLOOR = 0.03  # added to every probability before it is normalised, so that no cell is tiny
MAX_ORDER = 4


@dataclass(frozen=True)
class Subject:
    """A target and its contexts. Prompts of one context lead to the same law, whatever their length."""

    name: str
    model: Model
    params: Params
    contexts: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: int  # ids 0 .. tokens - 1 are counted; others have probability 0


def dirichlet_laws(
    vocab: int, positions: int, seed: int, mix: float = 0.35, concentration: float = 0.9
) -> tuple[Laws, Laws]:
    """Target and draft laws for every context of fewer than `positions` tokens: q = mix p + (1 - mix) d."""
    generator = np.random.default_rng(seed)
    target: Laws = {}
    draft: Laws = {}
    for length in range(positions):
        for context in itertools.product(range(vocab), repeat=length):
            p, d = (generator.dirichlet(np.full(vocab, concentration)) for _ in range(2))
            target[context] = (p + FLOOR) / (1 + vocab * FLOOR)
            q = mix * p + (1 - mix) * d
            draft[context] = (q + FLOOR) / (1 + vocab * FLOOR)
    return target, draft


@dataclass(frozen=True)
class TableDrafter(Drafter):
    """Draws from a table of its own, as `TableModel` reads its table; `order` is the target's."""

    order: int = MAX_ORDER
    seed: int = 7

    def init_params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """The draft laws of the chosen instance."""
        return table(model.vocab_size - 1, self.order, dirichlet_laws(model.vocab_size - 1, self.order, self.seed)[1])

    def laws(self, params: Params, target: Target, context: Int[Array, "B O"]) -> Float[Array, "B V"]:
        """The law that a token is drawn from, after the target's own filters."""
        logits = params["table"][tuple(context[:, i] for i in range(self.order))]
        return sampling.log_probs(logits[:, None], target.sampling)[:, 0]

    def draw(
        self, keys: Keys, params: Params, target: Target, context: Int[Array, "B O"]
    ) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
        """A token and the law that is reported for it."""
        log_q = self.laws(params, target, context)
        return sampling.draw(keys, log_q), log_q

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """A chain."""

        def step(context: Int[Array, "B O"], index: Int[Array, ""]) -> tuple[Array, tuple[Array, Array]]:
            token, log_q = self.draw(sampling.fold(keys, index), params, target, context)
            return jnp.concatenate([context[:, 1:], token[:, None]], 1), (token, log_q)

        steps = jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)
        _, (tokens, laws) = jax.lax.scan(step, last_tokens(target, self.order), steps)
        return Draft(jnp.swapaxes(tokens, 0, 1), jnp.swapaxes(laws, 0, 1), target.cache, state)


def last_tokens(target: Target, order: int) -> Int[Array, "B O"]:
    """The last `order` committed tokens; `vocab_size` stands for "before the text"."""
    index = target.length[:, None] + jnp.arange(-order, 0, dtype=jnp.int32)[None]
    return jnp.where(index >= 0, jnp.take_along_axis(target.tokens, jnp.maximum(index, 0), 1), target.model.vocab_size)


def table(vocab: int, order: int, laws: Laws) -> Params:
    """Logits of a `TableModel` of `vocab + 1` ids, of which the last marks the prompt's end and is never drawn.

    The first token after the marker is a plain draw (prefill emits it), so the instance begins anew
    behind it: its context () is the first round's. Contexts hold at most `order - 1` tokens.
    """
    marker = vocab
    values = np.full((vocab + 2,) * order + (vocab + 1,), 1 / vocab)
    values[..., marker] = 0
    for length in range(order):
        for context in itertools.product(range(vocab), repeat=length):
            behind: Any = (..., marker, *context, slice(vocab))
            values[behind] = laws[context[1:]]
    for context in itertools.product(range(vocab), repeat=order - 1):
        later: Any = (slice(vocab), *context, slice(vocab))
        values[later] = laws[context]
    return table_params(values)


def table_subject(vocab: int, order: int, seed: int) -> Subject:
    """A table target whose one context is reached from prompts of one to four tokens."""
    model = TableModel(vocab + 1, order)
    prompts = tuple((*(i % vocab for i in range(length)), vocab) for length in range(4))
    laws = dirichlet_laws(vocab, order, seed)[0]
    return Subject(f"table V={vocab} seed={seed}", model, table(vocab, order, laws), (prompts,), vocab)


def instances(num_speculative_tokens: int) -> list[tuple[Subject, TableDrafter]]:
    """The chosen instances, nearest to the asked number of drafts: V=4, K=2, seed 5; V=3, K=3, seed 7."""
    sizes = {1: [(4, 3, 5)], 2: [(4, 3, 5)], 3: [(3, 4, 7)]}.get(num_speculative_tokens, [(2, 4, 1)])
    return [(table_subject(*size), TableDrafter(num_speculative_tokens, size[1], size[2])) for size in sizes]


def llama_subject(
    vocab: int = 4, seed: int = 0, prompts: Sequence[Sequence[int]] = ((1,), (2, 0, 3), (0, 1, 2, 1, 0))
) -> Subject:
    """A tiny Llama with a vocabulary that can be enumerated; every prompt is a context of its own."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2}
    model, params = tiny_model(seed, vocab_size=vocab, num_kv_heads=1, context_length=256, **sizes)
    contexts = tuple((tuple(token % vocab for token in prompt),) for prompt in prompts)
    return Subject(f"tiny Llama V={vocab} seed={seed}", model, jax.tree.map(jnp.asarray, params), contexts, vocab)
