"""Acceptance rules with one fault each: the production walk calls them."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.verify import Lenient, Token, Typical

Row = Float[Array, "B"]
Laws = Float[Array, "B V"]
Choice = Bool[Array, "B"]


@dataclass(frozen=True)
class RedrawFromP(Token):
    """After a rejection the token is drawn from p."""

    def residual(self, probs: Laws, q: Laws) -> Laws:
        return probs


@dataclass(frozen=True)
class SoftmaxResidual(Token):
    """The residual goes through a softmax instead of being divided by its sum."""

    def residual(self, probs: Laws, q: Laws) -> Laws:
        return jnp.where(probs > 0, jnp.exp(jnp.maximum(probs - q, 0)), 0)


@dataclass(frozen=True)
class AbsoluteResidual(Token):
    """The residual is |p - q|."""

    def residual(self, probs: Laws, q: Laws) -> Laws:
        return jnp.abs(probs - q)


@dataclass(frozen=True)
class FlippedResidual(Token):
    """The residual is max(q - p, 0)."""

    def residual(self, probs: Laws, q: Laws) -> Laws:
        return jnp.maximum(q - probs, 0)


@dataclass(frozen=True)
class FlippedRatio(Token):
    """The ratio is q / p."""

    def accepts(self, u: Row, p: Row, q: Row, probs: Laws) -> Choice:
        return u * p < q


@dataclass(frozen=True)
class AlwaysAccept(Token):
    """The uniform is a constant 0."""

    def accepts(self, u: Row, p: Row, q: Row, probs: Laws) -> Choice:
        return 0 * u * q < p


@dataclass(frozen=True)
class NoUniform(Token):
    """A draft is accepted iff p >= q."""

    def accepts(self, u: Row, p: Row, q: Row, probs: Laws) -> Choice:
        return p >= q


@dataclass(frozen=True)
class GreedyTest(Token):
    """A draft is accepted iff it is the target's argmax, else the token is drawn from p."""

    def accepts(self, u: Row, p: Row, q: Row, probs: Laws) -> Choice:
        return p >= probs.max(-1)

    def residual(self, probs: Laws, q: Laws) -> Laws:
        return probs


@dataclass(frozen=True)
class OneHotResidualOfQ(Token):
    """A sampled draft is tested as a point mass, the residual takes q away."""

    def accepts(self, u: Row, p: Row, q: Row, probs: Laws) -> Choice:
        return u < p


@dataclass(frozen=True)
class OneHotNoExclusion(Token):
    """A sampled draft is tested as a point mass, and not excluded after its rejection."""

    def accepts(self, u: Row, p: Row, q: Row, probs: Laws) -> Choice:
        return u < p

    def residual(self, probs: Laws, q: Laws) -> Laws:
        return probs


@dataclass(frozen=True)
class EitherRule(Token):
    """A draft is accepted if it equals the target's draw or passes the ratio test."""

    def accepts(self, u: Row, p: Row, q: Row, probs: Laws) -> Choice:
        return u < 1 - (1 - p) * (1 - jnp.minimum(1, p / jnp.where(q > 0, q, 1)))


@dataclass(frozen=True)
class EpsilonInRatio(Token):
    """A constant 1e-2 is added to q in the ratio."""

    epsilon: float = 1e-2

    def accepts(self, u: Row, p: Row, q: Row, probs: Laws) -> Choice:
        return u * (q + self.epsilon) < p


@dataclass(frozen=True)
class SmallEpsilonInRatio(EpsilonInRatio):
    """A constant 1e-3 is added to q in the ratio."""

    epsilon: float = 1e-3


@dataclass(frozen=True)
class NotStrict(Token):
    """u q <= p: at u = 0 a token of probability 0 is accepted."""

    def accepts(self, u: Row, p: Row, q: Row, probs: Laws) -> Choice:
        return u * q <= p


@dataclass(frozen=True)
class SlightlyLenient(Lenient):
    """Lenience 0.99."""

    lenience: float = 0.99


FAULTY_RULES = [
    RedrawFromP(), SoftmaxResidual(), AbsoluteResidual(), FlippedResidual(), FlippedRatio(), AlwaysAccept(),
    NoUniform(), GreedyTest(), OneHotResidualOfQ(), OneHotNoExclusion(), EitherRule(), EpsilonInRatio(),
    SmallEpsilonInRatio(), NotStrict(), Typical(), Lenient(), SlightlyLenient(),
]  # fmt: skip
