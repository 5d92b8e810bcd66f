"""Drafters that report a wrong law only under a condition: what mixed batches of short texts never meet.

One drafter is all of them, and its weights say which: one compilation serves the whole list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key, PyTree

from specjax import decode, sampling
from specjax.exactness.subjects import TableDrafter
from specjax.types import Draft, Keys, Model, Params, Target

Lies = Callable[[Target], Bool[Array, "B"]]


def _rows(holds: bool | Bool[Array, ""], target: Target) -> Bool[Array, "B"]:
    return jnp.broadcast_to(jnp.asarray(holds), target.length.shape)


SILENT, HONEST = "silent for eight rounds", "never"
CONDITIONAL: dict[str, Lies] = {
    "one row": lambda t: _rows(t.length.shape[0] == 1, t),
    "more than one row, equal temperatures": lambda t: _rows(
        (t.length.shape[0] > 1) & jnp.all(t.sampling.temperature == t.sampling.temperature[0]), t
    ),
    "text longer than 16": lambda t: t.length > 16,
    "text beyond a prompt's first chunk": lambda t: t.length > decode.PREFILL_CHUNK,
    "temperature above 1": lambda t: t.sampling.temperature > 1,
    "top-k and top-p": lambda t: (t.sampling.top_k > 0) & (t.sampling.top_p < 1),
    "top-k and min-p": lambda t: (t.sampling.top_k > 0) & (t.sampling.min_p > 0),
    "top-p and min-p": lambda t: (t.sampling.top_p < 1) & (t.sampling.min_p > 0),
    SILENT: lambda t: _rows(True, t),
    HONEST: lambda t: _rows(False, t),
}
SILENT_ROUNDS = 8


def seed_of(name: str, own_noise: bool) -> int:
    """The `Experiment.drafter_seed` that chooses a liar."""
    return 2 * list(CONDITIONAL).index(name) + own_noise


@dataclass(frozen=True)
class ConditionalLiars(TableDrafter):
    """The liar whom the key's last word names, so that `Experiment.drafter_seed` chooses it.

    It halves the logits of the law that it reports. Of noise of its own, its draws can't be replayed: only the
    tokens that are decoded show the lie.
    """

    def init_params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """The table, which liar this is, and whether its noise is its own."""
        seed = jax.random.key_data(key)[-1]
        return super().init_params(key, model, target_params) | {"liar": seed // 2, "own_noise": seed % 2 == 1}

    def init(self, params: Params, model: Model, batch: int, capacity: int, dtype: Any) -> PyTree[Array]:
        """Rounds that each row drafted for."""
        return jnp.zeros((batch,), jnp.int32)

    def propose(self, keys: Keys, params: Params, state: Int[Array, "B"], target: Target) -> Draft:
        """A chain, told truly or not; a silent liar's is empty at first."""
        own, round_s = jax.random.key_data(sampling.fold(keys, 99)), jax.random.key_data(keys)
        keys = jax.random.wrap_key_data(jnp.where(params["own_noise"], own, round_s))
        draft = super().propose(keys, params, state, target)
        assert draft.log_q is not None
        lies = jnp.stack([holds(target) for holds in CONDITIONAL.values()])[params["liar"]]
        told = jnp.where(draft.log_q > -jnp.inf, draft.log_q * 0.5, -jnp.inf)
        log_q = jnp.where(lies[:, None, None], jax.nn.log_softmax(told), draft.log_q)
        silent = (params["liar"] == list(CONDITIONAL).index(SILENT)) & (state < SILENT_ROUNDS)
        count = jnp.where(silent, 0, self.num_speculative_tokens).astype(jnp.int32)
        return replace(draft, log_q=log_q, count=count, state=state + 1)
