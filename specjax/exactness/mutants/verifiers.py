"""Whole verifications with one fault each. Names say what is computed.

What is wrong with the probabilities is a `decide` of its own, which the enumeration gate sees; what is wrong with
the randomness is a `verify` of its own, which only samples show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling
from specjax.types import Draft, Keys, Verdict
from specjax.verify import Token
from specjax.verify.walk import normalise


@dataclass(frozen=True)
class SharedUniform(Token):
    """One uniform for all positions of a window."""

    def verify(self, keys: Keys, log_p: Array, draft: Draft, live: Array) -> Verdict:
        u = jnp.broadcast_to(_uniforms(keys, draft)[:, :1], draft.tokens.shape)
        return _drawn(keys, self.decide(log_p, draft, live, u))


@dataclass(frozen=True)
class RowZeroUniform(Token):
    """Every row is given row 0's uniforms: each law is right, but sequences aren't independent."""

    def verify(self, keys: Keys, log_p: Array, draft: Draft, live: Array) -> Verdict:
        u = jnp.broadcast_to(_uniforms(keys, draft)[:1], draft.tokens.shape)
        return _drawn(keys, self.decide(log_p, draft, live, u))


@dataclass(frozen=True)
class AcceptanceNoiseReused(Token):
    """The uniform that rejected a draft also inverts the residual's distribution function."""

    def verify(self, keys: Keys, log_p: Array, draft: Draft, live: Array) -> Verdict:
        u = _uniforms(keys, draft)
        verdict = _drawn(keys, self.decide(log_p, draft, live, u))
        last = jnp.take_along_axis(u, jnp.maximum(verdict.tested - 1, 0)[:, None], 1)
        law = verdict.probs
        picked = jnp.sum(jnp.cumsum(law, -1) <= last * law.sum(-1, keepdims=True), -1, dtype=jnp.int32)
        return replace(verdict, bonus=jnp.where(_full(verdict, live), verdict.bonus, picked))


@dataclass(frozen=True)
class DraftNoiseReused(Token):
    """The residual is drawn with the very noise that drew the rejected draft."""

    def verify(self, keys: Keys, log_p: Array, draft: Draft, live: Array) -> Verdict:
        verdict = self.decide(log_p, draft, live, _uniforms(keys, draft))
        noise = sampling.fold(sampling.fold(keys, sampling.DRAFT), verdict.accepted)
        return replace(verdict, bonus=sampling.draw(noise, jnp.log(verdict.probs)))


@dataclass(frozen=True)
class DraftUniformReused(Token):
    """The uniform that drew the draft by inversion also tests it."""

    def verify(self, keys: Keys, log_p: Array, draft: Draft, live: Array) -> Verdict:
        q = jnp.exp(_log_q(draft))
        chosen = jnp.take_along_axis(q, draft.tokens[..., None], -1)[..., 0]
        upper = jnp.take_along_axis(jnp.cumsum(q, -1), draft.tokens[..., None], -1)[..., 0]
        return _drawn(keys, self.decide(log_p, draft, live, upper - chosen * _uniforms(keys, draft)))


@dataclass(frozen=True)
class BonusFromResidual(Token):
    """After a full acceptance the bonus token is drawn from max(p - q, 0), q of the last draft."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        verdict = super().decide(log_p, draft, live, u)
        law = normalise(jnp.maximum(verdict.probs - _row(_log_q(draft), verdict.accepted - 1), 0), verdict.probs)
        return _replaced(verdict, _full(verdict, live) & (verdict.accepted > 0), law)


@dataclass(frozen=True)
class BonusFromDraft(Token):
    """After a full acceptance the bonus token is drawn from the drafter's last law."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        verdict = super().decide(log_p, draft, live, u)
        full = _full(verdict, live) & (verdict.accepted > 0)
        return _replaced(verdict, full, _row(_log_q(draft), verdict.accepted - 1))


@dataclass(frozen=True)
class BonusFromPreviousRow(Token):
    """After a full acceptance the bonus token is drawn from the row before the last."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        verdict = super().decide(log_p, draft, live, u)
        return _replaced(verdict, _full(verdict, live), _row(log_p, verdict.accepted - 1))


@dataclass(frozen=True)
class ResidualNextRow(Token):
    """The residual is made of the row after the rejected draft's."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        verdict = super().decide(log_p, draft, live, u)
        index = jnp.minimum(verdict.accepted + 1, draft.tokens.shape[1] - 1)
        law = normalise(jnp.maximum(_row(log_p, index) - _row(_log_q(draft), index), 0), verdict.probs)
        return _replaced(verdict, ~_full(verdict, live), law)


@dataclass(frozen=True)
class RowOfPOff(Token):
    """Draft i is tested against row i + 1 of p."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        return super().decide(jnp.concatenate([log_p[:, 1:], log_p[:, -1:]], 1), draft, live, u)


@dataclass(frozen=True)
class RowOfQOff(Token):
    """Draft i is tested with row i - 1 of q."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        log_q = jnp.concatenate([_log_q(draft)[:, :1], _log_q(draft)[:, :-1]], 1)
        return super().decide(log_p, replace(draft, log_q=log_q), live, u)


@dataclass(frozen=True)
class ResidualNotNormalised(Token):
    """The residual's distribution function is inverted without dividing by its mass: the last id takes the rest."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        verdict = super().decide(log_p, draft, live, u)
        law = jnp.maximum(_row(log_p, verdict.accepted) - _row(_log_q(draft), verdict.accepted), 0)
        return _replaced(verdict, ~_full(verdict, live), law.at[:, -2].add(1 - law.sum(-1)))


@dataclass(frozen=True)
class ResidualAtDraftOnly(Token):
    """The residual takes q away at the rejected token alone."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        verdict = super().decide(log_p, draft, live, u)
        index = jnp.minimum(verdict.accepted, draft.tokens.shape[1] - 1)
        drafted = jnp.take_along_axis(draft.tokens, index[:, None], 1)
        here = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None] == drafted
        p = _row(log_p, index)
        law = normalise(jnp.where(here, jnp.maximum(p - _row(_log_q(draft), index), 0), p), p)
        return _replaced(verdict, ~_full(verdict, live), law)


@dataclass(frozen=True)
class FirstAlwaysAccepted(Token):
    """The first draft is kept without a test."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        return super().decide(log_p, draft, live, u.at[:, 0].set(0))


@dataclass(frozen=True)
class NoBreak(Token):
    """Drafts behind a rejected one are still tested, and the last accepted one wins."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        verdict = super().decide(log_p, draft, live, u)
        token = draft.tokens[..., None]
        p, q = (jnp.exp(jnp.take_along_axis(laws, token, -1)[..., 0]) for laws in (log_p[:, :-1], _log_q(draft)))
        steps = jnp.arange(1, draft.tokens.shape[1] + 1, dtype=jnp.int32)[None]
        accepted = jnp.max(jnp.where(live & (u * q < p), steps, 0), -1)
        path = jnp.where(steps <= accepted[:, None], steps - 1, -1)
        law = _row(log_p, accepted)
        rest = normalise(jnp.maximum(law - _row(_log_q(draft), accepted), 0), law)
        verdict = replace(verdict, path=path, accepted=accepted, tested=accepted, probs=law)
        return _replaced(verdict, ~_full(verdict, live), rest)


@dataclass(frozen=True)
class BudgetIgnored(Token):
    """Padding and tokens past the budget are tested, and counted, like drafts."""

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        return super().decide(log_p, draft, jnp.ones_like(live), u)


def _uniforms(keys: Keys, draft: Draft) -> Float[Array, "B N"]:
    return sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), draft.tokens.shape[1])


def _drawn(keys: Keys, verdict: Verdict) -> Verdict:
    return replace(verdict, bonus=sampling.draw(sampling.fold(keys, sampling.BONUS), jnp.log(verdict.probs)))


def _full(verdict: Verdict, live: Array) -> Bool[Array, "B"]:
    """Rows whose every live draft was accepted."""
    return verdict.accepted == live.sum(-1, dtype=jnp.int32)


def _replaced(verdict: Verdict, where: Bool[Array, "B"], law: Float[Array, "B V"]) -> Verdict:
    return replace(verdict, probs=jnp.where(where[:, None], law, verdict.probs))


def _log_q(draft: Draft) -> Float[Array, "B N V"]:
    assert draft.log_q is not None
    return draft.log_q


def _row(log_laws: Float[Array, "B S V"], index: Int[Array, "B"]) -> Float[Array, "B V"]:
    index = jnp.clip(index, 0, log_laws.shape[1] - 1)
    return jnp.take_along_axis(jnp.exp(log_laws), index[:, None, None], 1)[:, 0]


FAULTY_VERIFIERS = [
    SharedUniform(), RowZeroUniform(), AcceptanceNoiseReused(), DraftNoiseReused(), DraftUniformReused(),
    BonusFromResidual(), BonusFromDraft(), BonusFromPreviousRow(), ResidualNextRow(), RowOfPOff(), RowOfQOff(),
    ResidualNotNormalised(), ResidualAtDraftOnly(), FirstAlwaysAccepted(), NoBreak(), BudgetIgnored(),
]  # fmt: skip
