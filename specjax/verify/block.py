"""Block verification: a whole chain is judged at once, so that a bad token can be saved by good ones behind it.

Sun et al. 2024 (arXiv 2403.10444, algorithm 2). With w_0 = 1, the weight of a prefix is

    w_i = min(w_{i-1} p(x_i) / q(x_i), 1)                              p, q given x_1 .. x_{i-1}
    gain_i = sum_x max(w_i p(x) - q(x), 0)                             p, q given x_1 .. x_i

and of the K drafts the longest prefix i with u_i < gain_i / (gain_i + 1 - w_i) is accepted, or all of them if
u_K < w_K. The bonus token is drawn from norm(max(w_i p - q, 0)), and from p behind the last draft. Given x_1 .. x_i,
at least i drafts are accepted with probability w_i. Under `Token` it is the product of min(p / q, 1), never more;
no rule that is given the chain alone accepts more on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.types import Draft, Verdict
from specjax.verify.rule import DecisionRule, NotAChainError
from specjax.verify.walk import Token, normalise


@dataclass(frozen=True)
class Block(DecisionRule):
    """Exact verification of a whole chain: accepts at least as many drafts as `token`, on the same drafts.

    Its gain is zero for a single draft, for point masses and at temperature 0. The methods below `decide` are
    the steps of the algorithm.
    """

    def decide(
        self, log_p: Float[Array, "B M V"], draft: Draft, live: Bool[Array, "B N"], u: Float[Array, "B N"]
    ) -> Verdict:
        """Judge every prefix; the longest that succeeds is accepted.

        Counts mean what they mean under `Token`. `tested`: the accepted drafts and the next one, if there is one:
        a draft was accepted or not given that all before it were. `overlap`: sum_x min(w_i p, q), summed over
        the live drafts; its expectation is that of the accepted drafts.
        """
        if draft.tokens.shape[1] == 0:
            return Token().decide(log_p, draft, live, u)
        p, q, p_token, q_token, live = self._window(log_p, draft, live)
        count = live.sum(-1, dtype=jnp.int32)
        steps = jnp.arange(1, draft.tokens.shape[1] + 1, dtype=jnp.int32)[None]

        weight = self.weights(p_token, q_token)
        weighted = weight[..., None] * p[:, :-1]
        gain = jnp.maximum(weighted - q, 0).sum(-1)
        inside = u[:, :-1] * self.loss(gain, weight, weighted, q)[:, 1:] < gain[:, 1:]
        last = u * q_token < self.last(weight, p_token, q_token)
        success = live & jnp.where(steps == count[:, None], last, jnp.pad(inside, ((0, 0), (0, 1))))
        accepted = self.longest(success)

        row = jnp.minimum(accepted, draft.tokens.shape[1] - 1)
        rest = self.residual(_take(weight[..., None], row), _take(p, row), _take(q, row))
        overlap = jnp.nansum(jnp.minimum(weighted, q), -1)
        return Verdict(
            path=jnp.where(steps <= accepted[:, None], steps - 1, -1),
            accepted=accepted,
            probs=jnp.where((accepted == count)[:, None], _take(p, accepted), rest),
            tested=jnp.minimum(accepted + 1, count),
            overlap=jnp.sum(jnp.where(live, overlap, 0), -1),
            bonus=jnp.full_like(accepted, -1),
        )

    def _window(self, log_p: Array, draft: Draft, live: Array) -> tuple[Array, Array, Array, Array, Array]:
        """p, q, both of the drafted tokens, and the live drafts: a chain ends at its first dead one."""
        if draft.parents is not None:
            raise NotAChainError(
                f"rule {self} verifies chains, and the drafter proposes a tree: use the rule `token`, or a drafter "
                "that proposes a chain"
            )
        one_hot = draft.tokens[..., None] == jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None]
        p = jnp.exp(log_p)
        q = one_hot.astype(p.dtype) if draft.log_q is None else jnp.exp(draft.log_q)
        p_token, q_token = (jnp.sum(jnp.where(one_hot, part, 0), -1) for part in (p[:, :-1], q))
        live = live & ~jnp.any(jnp.isnan(q), -1)  # a q of NaNs is no proposal
        return p, q, p_token, q_token, jnp.cumprod(live, -1).astype(bool)

    def weights(self, p: Float[Array, "B K"], q: Float[Array, "B K"]) -> Float[Array, "B K"]:
        """w_0 to w_{K-1} from the probabilities of the drafted tokens; 0 behind a token that the target excludes."""
        found = [jnp.ones_like(p[:, 0])]
        for i in range(p.shape[1] - 1):
            joint = found[-1] * p[:, i]
            less = joint < q[:, i]
            found.append(jnp.where(less, joint / jnp.where(less, q[:, i], 1), (joint > 0).astype(p.dtype)))
        return jnp.stack(found, 1)

    def loss(
        self, gain: Float[Array, "B K"], weight: Float[Array, "B K"], weighted: Float[Array, "B K V"],
        q: Float[Array, "B K V"],
    ) -> Float[Array, "B K"]:  # fmt: skip
        """What u_i is multiplied with before it is compared with `gain_i`."""
        return gain + 1 - weight

    def last(self, weight: Float[Array, "B K"], p: Float[Array, "B K"], q: Float[Array, "B K"]) -> Float[Array, "B K"]:
        """What u_K q(x_K) is compared with: the test of `Token`, of the weighted probabilities."""
        return weight * p

    def longest(self, success: Bool[Array, "B K"]) -> Int[Array, "B"]:
        """Drafts accepted: a failure ends nothing."""
        return jnp.max(jnp.where(success, jnp.arange(1, success.shape[1] + 1, dtype=jnp.int32)[None], 0), -1)

    def residual(
        self, weight: Float[Array, "B 1"], p: Float[Array, "B V"], q: Float[Array, "B V"]
    ) -> Float[Array, "B V"]:
        """Probabilities of the bonus token behind an accepted prefix that is not the whole draft."""
        return normalise(jnp.maximum(weight * p - q, 0), p)


def _take(rows: Float[Array, "B S X"], index: Int[Array, "B"]) -> Float[Array, "B X"]:
    return jnp.take_along_axis(rows, index[:, None, None], 1)[:, 0]
