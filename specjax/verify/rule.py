"""What a rule of verification is: one method, and the form that most rules have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax import sampling
from specjax.types import Draft, Keys, Verdict


@runtime_checkable
class Rule(Protocol):
    """Which drafted tokens the target accepts, and the bonus token. A frozen dataclass: it is static under `jit`.

    Whether a rule keeps the target's probabilities is not its own to say: see `specjax.verify.EXACT`.
    """

    def verify(self, keys: Keys, log_p: Float[Array, "B M V"], draft: Draft, live: Bool[Array, "B N"]) -> Verdict:
        """Verify a window.

        Args:
          keys: of this round, one a row; a rule folds a role of its own into them (`specjax.sampling`).
          log_p: M = N + 1 rows: row 0 follows the pending token, row i + 1 follows node i.
          live: nodes that may be accepted; the rest are as if never proposed.
        """


@dataclass(frozen=True)
class DecisionRule:
    """A rule that needs one uniform a node, and one draw for the bonus token: override `decide`.

    The exactness lab computes what such a rule emits instead of sampling it: it hands in the uniforms.
    """

    def decide(
        self, log_p: Float[Array, "B M V"], draft: Draft, live: Bool[Array, "B N"], u: Float[Array, "B N"]
    ) -> Verdict:
        """All but the bonus token (-1 here), given uniforms in [0, 1): below some threshold each one accepts."""
        raise NotImplementedError

    def verify(self, keys: Keys, log_p: Float[Array, "B M V"], draft: Draft, live: Bool[Array, "B N"]) -> Verdict:
        """Uniforms, `decide`, and a draw of the bonus token."""
        u = sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), draft.tokens.shape[1])
        verdict = self.decide(log_p, draft, live, u)
        bonus = sampling.draw(sampling.fold(keys, sampling.BONUS), jnp.log(verdict.probs))
        return replace(verdict, bonus=bonus)


class NotAChainError(ValueError):
    """A rule for chains was given a tree."""
