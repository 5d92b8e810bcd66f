"""Verification: which drafted tokens the target accepts, and the law of the one that follows.

Arrays in, arrays out; this file knows no model. One walk serves chains and trees. At the current node,
with remaining law r (at first p), its children are tried in order: child x, drawn from q, is accepted iff
u q(x) < r(x); after a rejection r becomes the residual norm(max(r - q, 0)). The first accepted child
becomes the current node; where none is, the further token is drawn from r. On a chain this is Leviathan
et al. 2023 (arXiv 2211.17192, algorithm 1) and Chen et al. 2023 (arXiv 2302.01318, algorithm 2); with
siblings it is recursive rejection sampling (Miao et al. 2023, arXiv 2305.09781, algorithm 2), exact as
long as each `log_q` row is the law its node was really drawn from, given its elder siblings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling
from specjax.types import Draft, Keys, Verdict


@runtime_checkable
class Rule(Protocol):
    """An acceptance rule: a frozen dataclass, hashable, so that it is static under `jit`."""

    @property
    def point_mass(self) -> bool:
        """Whether the rule sees every draft as certain: `q` is then one-hot, whatever the drafter reports."""

    def accepts(
        self, u: Float[Array, "B"], p: Float[Array, "B"], q: Float[Array, "B"], law: Float[Array, "B V"]
    ) -> Bool[Array, "B"]:
        """Whether a drafted token with probabilities `p` (of `law`) and `q` is accepted, given a uniform."""

    def residual(self, law: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Unnormalised law that remains at the node after the rejection."""


@dataclass(frozen=True)
class Token:
    """Exact token-level verification. Strict, no division, no epsilon: p(x) = 0 is never accepted."""

    point_mass: ClassVar[bool] = False

    def verify(self, keys: Keys, log_p: Float[Array, "B M V"], draft: Draft, live: Bool[Array, "B N"]) -> Verdict:
        return verify(self, keys, log_p, draft, live)

    def accepts(
        self, u: Float[Array, "B"], p: Float[Array, "B"], q: Float[Array, "B"], law: Float[Array, "B V"]
    ) -> Bool[Array, "B"]:
        return u * q < p

    def residual(self, law: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return jnp.maximum(law - q, 0)


@dataclass(frozen=True)
class Match(Token):
    """Draw y from the target and keep the draft while it equals y: exact for every proposer, q unused.

    This is `Token` with a one-hot q: x is accepted with probability p(x), and what remains is p without x,
    which is the law of y given y != x. Reports that the rule is biased hold for an implementation that
    draws again from norm(max(p - q, 0)) after a mismatch (tests/test_exactness.py settles both).
    It accepts sum p q where `Token` accepts sum min(p, q).
    """

    point_mass: ClassVar[bool] = True


@dataclass(frozen=True)
class Typical(Token):
    """Approximate: accept iff p(x) > min(epsilon, delta exp(-H(p))); Cai et al. 2024, arXiv 2401.10774, section 2.3.1.

    After a rejection the further token is drawn from p. Defaults are those of the paper's code.
    """

    epsilon: float = 0.3
    delta: float = 0.09

    def accepts(
        self, u: Float[Array, "B"], p: Float[Array, "B"], q: Float[Array, "B"], law: Float[Array, "B V"]
    ) -> Bool[Array, "B"]:
        entropy = -jnp.sum(jnp.where(law > 0, law * jnp.log(jnp.where(law > 0, law, 1)), 0), -1)
        return p > jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))

    def residual(self, law: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return law


@dataclass(frozen=True)
class Lenient(Token):
    """Approximate: q is multiplied by `lenience` before the comparison; Leviathan et al. 2023, appendix A.5."""

    lenience: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience={self.lenience}: must be in (0, 1]; 1 is the rule `token`")

    def accepts(
        self, u: Float[Array, "B"], p: Float[Array, "B"], q: Float[Array, "B"], law: Float[Array, "B V"]
    ) -> Bool[Array, "B"]:
        return self.lenience * u * q < p


RULES: dict[str, type[Token]] = {"token": Token, "match": Match, "typical": Typical, "lenient": Lenient}
"""The rules that come with specjax, by the name that `--rule` takes."""

EXACT: frozenset[type] = frozenset({Token, Match})
"""The rules that are proven to keep the target's law. A rule can't declare itself exact."""


def is_exact(rule: Rule) -> bool:
    """Whether `rule` keeps the target's law for every drafter that reports the law it drew from."""
    return type(rule) in EXACT


def walk(
    rule: Rule,
    log_p: Float[Array, "B M V"],
    draft: Draft,
    live: Bool[Array, "B N"],
    u: Float[Array, "B N"],
) -> Verdict:
    """Walk from the pending token along accepted nodes, with the randomness given.

    Args:
      log_p: M = N + 1 rows: row 0 is the law after the pending token, row i + 1 the law after node i.
      live: nodes that may be accepted; the rest are skipped as if never proposed.
      u: one uniform in [0, 1) a node.
    """
    batch, nodes = draft.tokens.shape
    depth = nodes if draft.depth is None else draft.depth
    parents = parents_of(draft)
    log_q = None if rule.point_mass else draft.log_q
    vocabulary = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None]

    def at(values: Array, i: Int[Array, ""]) -> Array:
        return jax.lax.dynamic_index_in_dim(values, i, 1, keepdims=False)

    def test_node(i: Int[Array, ""], carry: Any) -> Any:
        node, law, path, accepted, tested, overlap = carry
        one_hot = vocabulary == at(draft.tokens, i)[:, None]
        q = one_hot.astype(law.dtype) if log_q is None else jnp.exp(at(log_q, i))
        p_token = jnp.sum(jnp.where(one_hot, law, 0), -1)
        q_token = jnp.sum(jnp.where(one_hot, q, 0), -1)
        test = at(live, i) & (at(parents, i) == node) & (accepted < depth)
        accept = test & rule.accepts(at(u, i), p_token, q_token, law)
        reject = test & ~accept

        tested += test.astype(jnp.int32)
        overlap += jnp.where(test, jnp.nansum(jnp.minimum(law, q), -1), 0)
        node = jnp.where(accept, i, node)
        path = path.at[jnp.arange(batch), jnp.where(accept, accepted, depth)].set(i, mode="drop")
        accepted += accept.astype(jnp.int32)
        rest = rule.residual(law, q)
        mass = rest.sum(-1, keepdims=True)
        rest = jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1), law)  # p = q up to rounding
        law = jnp.where(accept[:, None], jnp.exp(at(log_p, i + 1)), jnp.where(reject[:, None], rest, law))
        return node, law, path, accepted, tested, overlap

    none = jnp.zeros((batch,), jnp.int32)
    path = jnp.full((batch, depth), -1, jnp.int32)
    carry = (none - 1, jnp.exp(log_p[:, 0]), path, none, none, jnp.zeros((batch,), log_p.dtype))
    if nodes > 0:  # not a Python loop: unrolled, each node is fused with all before it and compiled ever more slowly
        carry = jax.lax.fori_loop(0, nodes, test_node, carry)
    _, law, path, accepted, tested, overlap = carry
    return Verdict(path, accepted, law, tested, overlap, jnp.zeros((batch,), jnp.int32))


def verify(rule: Rule, keys: Keys, log_p: Float[Array, "B M V"], draft: Draft, live: Bool[Array, "B N"]) -> Verdict:
    """The random part around `walk`: uniforms for the tests, and a draw of the bonus token."""
    u = sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), draft.tokens.shape[1])
    verdict = walk(rule, log_p, draft, live, u)
    return replace(verdict, bonus=sampling.draw(sampling.fold(keys, sampling.BONUS), jnp.log(verdict.probs)))


def parents_of(draft: Draft) -> Int[Array, "B N"]:
    """Each node's parent; -1 is the pending token."""
    chain = jnp.arange(-1, draft.tokens.shape[1] - 1, dtype=jnp.int32)
    return jnp.broadcast_to(chain if draft.parents is None else draft.parents, draft.tokens.shape)


def ancestors(draft: Draft) -> Bool[Array, "B N N"]:
    """`[..., i, j]`: node j is node i or above it. Rows sum to a node's depth."""
    parents = parents_of(draft)
    rows, nodes = parents.shape
    above = jnp.zeros((rows, nodes, nodes), bool)
    for i in range(nodes):
        inherited = jnp.take_along_axis(above, jnp.maximum(parents[:, i], 0)[:, None, None], 1)[:, 0]
        inherited = inherited & (parents[:, i] >= 0)[:, None]
        above = above.at[:, i].set(inherited | (jnp.arange(nodes) == i)[None])
    return above
