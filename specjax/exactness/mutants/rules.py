"""Verification with one fault each: `Token` with a part replaced. Names say what is computed.

What is wrong with the probabilities is seen by the enumeration gate; what is wrong with the randomness changes
`verify` itself, which only samples show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling, verify
from specjax.exactness.mutants.blocks import BlockTokenResidual, BlockWithBreak, LastRatioUncapped
from specjax.types import Draft, Keys, Verdict
from specjax.verify import Lenient, Token, Typical
from specjax.verify.walk import normalise

Window = tuple[Array, Draft, Array, Array]  # what `decide` is given: log_p, draft, live, u
RIGHT = Token()


def _window(*given: Any) -> Any:
    return given


def _verdict(verdict: Verdict, *given: Any) -> Verdict:
    return verdict


@dataclass(frozen=True)
class Faulty(Token):
    """`Token` with its test, its residual, what it is given or what it decides replaced."""

    test: Callable[..., Array] = RIGHT.accepts
    rest: Callable[[Array, Array], Array] = RIGHT.residual
    given: Callable[..., Window] = _window
    after: Callable[..., Verdict] = _verdict

    def accepts(self, u: Array, p: Array, q: Array, probs: Array) -> Array:
        return self.test(u, p, q, probs)

    def residual(self, probs: Array, q: Array) -> Array:
        return self.rest(probs, q)

    def decide(self, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        return self.after(super().decide(*self.given(log_p, draft, live, u)), log_p, draft, live, u)


@dataclass(frozen=True)
class FaultyNoise(Token):
    """`Token` with other uniforms, or with a bonus token drawn otherwise: of verdict, uniforms, keys, live."""

    uniforms: Callable[[Array, Draft], Array] = lambda u, draft: u
    bonus: Callable[..., Array] = lambda verdict, *given: verdict.bonus

    def verify(self, keys: Keys, log_p: Array, draft: Draft, live: Array) -> Verdict:
        u = sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), draft.tokens.shape[1])
        u = self.uniforms(u, draft)
        verdict = self.decide(log_p, draft, live, u)
        drawn = sampling.draw(sampling.fold(keys, sampling.BONUS), jnp.log(verdict.probs))
        verdict = replace(verdict, bonus=drawn)
        return replace(verdict, bonus=self.bonus(verdict, u, keys, live))


def _reject_again(verdict: Verdict, u: Array, keys: Keys, live: Array) -> Array:
    last = jnp.take_along_axis(u, jnp.maximum(verdict.tested - 1, 0)[:, None], 1)
    law = verdict.probs
    picked = jnp.sum(jnp.cumsum(law, -1) <= last * law.sum(-1, keepdims=True), -1, dtype=jnp.int32)
    return jnp.where(_full(verdict, live), verdict.bonus, picked)


def _draw_again(verdict: Verdict, u: Array, keys: Keys, live: Array) -> Array:
    noise = sampling.fold(sampling.fold(keys, sampling.DRAFT), verdict.accepted)
    return sampling.draw(noise, jnp.log(verdict.probs))


def _inverting(u: Array, draft: Draft) -> Array:
    q, token = jnp.exp(_log_q(draft)), draft.tokens[..., None]
    chosen, upper = (jnp.take_along_axis(part, token, -1)[..., 0] for part in (q, jnp.cumsum(q, -1)))
    return upper - chosen * u


def _bonus(law: Callable[[Array, Array, Array], Array]) -> Faulty:
    """Another law of the bonus token behind a full acceptance: of p there, and p and q of the last draft."""

    def after(verdict: Verdict, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        full, last = _full(verdict, live) & (verdict.accepted > 0), verdict.accepted - 1
        return _replaced(verdict, full, law(verdict.probs, _row(log_p, last), _row(_log_q(draft), last)))

    return Faulty(after=after)


def _residual(law: Callable[[Array, Array, Array], Array], offset: int = 0) -> Faulty:
    """Another law after a rejection: of p and q there (or `offset` rows behind), and where the draft is."""

    def after(verdict: Verdict, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
        index = jnp.minimum(verdict.accepted + offset, draft.tokens.shape[1] - 1)
        drafted = jnp.take_along_axis(draft.tokens, index[:, None], 1)
        here = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None] == drafted
        return _replaced(verdict, ~_full(verdict, live), law(_row(log_p, index), _row(_log_q(draft), index), here))

    return Faulty(after=after)


def _unnormalised(p: Array, q: Array, here: Array) -> Array:
    law = jnp.maximum(p - q, 0)
    return law.at[:, -2].add(1 - law.sum(-1))


def _no_break(verdict: Verdict, log_p: Array, draft: Draft, live: Array, u: Array) -> Verdict:
    token = draft.tokens[..., None]
    p, q = (jnp.exp(jnp.take_along_axis(laws, token, -1)[..., 0]) for laws in (log_p[:, :-1], _log_q(draft)))
    steps = jnp.arange(1, draft.tokens.shape[1] + 1, dtype=jnp.int32)[None]
    accepted = jnp.max(jnp.where(live & (u * q < p), steps, 0), -1)
    path = jnp.where(steps <= accepted[:, None], steps - 1, -1)
    law = _row(log_p, accepted)
    rest = normalise(jnp.maximum(law - _row(_log_q(draft), accepted), 0), law)
    verdict = replace(verdict, path=path, accepted=accepted, tested=accepted, probs=law)
    return _replaced(verdict, ~_full(verdict, live), rest)


def _p_off(log_p: Array, draft: Draft, live: Array, u: Array) -> Window:
    return jnp.concatenate([log_p[:, 1:], log_p[:, -1:]], 1), draft, live, u


def _q_off(log_p: Array, draft: Draft, live: Array, u: Array) -> Window:
    log_q = _log_q(draft)
    return log_p, replace(draft, log_q=jnp.concatenate([log_q[:, :1], log_q[:, :-1]], 1)), live, u


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


def _epsilon(size: float) -> Faulty:
    return Faulty(test=lambda u, p, q, probs: u * (q + size) < p)


FAULTS: dict[str, tuple[str, verify.Rule]] = {
    "RedrawFromP": ("After a rejection the token is drawn from p.", Faulty(rest=lambda probs, q: probs)),
    "SoftmaxResidual": (
        "The residual goes through a softmax instead of being divided by its sum.",
        Faulty(rest=lambda probs, q: jnp.where(probs > 0, jnp.exp(jnp.maximum(probs - q, 0)), 0)),
    ),
    "AbsoluteResidual": ("The residual is |p - q|.", Faulty(rest=lambda probs, q: jnp.abs(probs - q))),
    "FlippedResidual": ("The residual is max(q - p, 0).", Faulty(rest=lambda probs, q: jnp.maximum(q - probs, 0))),
    "FlippedRatio": ("The ratio is q / p.", Faulty(test=lambda u, p, q, probs: u * p < q)),
    "AlwaysAccept": ("The uniform is a constant 0.", Faulty(test=lambda u, p, q, probs: 0 * u * q < p)),
    "NoUniform": ("A draft is accepted iff p >= q.", Faulty(test=lambda u, p, q, probs: p >= q)),
    "GreedyTest": (
        "A draft is accepted iff it is the target's argmax, else the token is drawn from p.",
        Faulty(test=lambda u, p, q, probs: p >= probs.max(-1), rest=lambda probs, q: probs),
    ),
    "OneHotResidualOfQ": (
        "A sampled draft is tested as a point mass, the residual takes q away.",
        Faulty(test=lambda u, p, q, probs: u < p),
    ),
    "OneHotNoExclusion": (
        "A sampled draft is tested as a point mass, and not excluded after its rejection.",
        Faulty(test=lambda u, p, q, probs: u < p, rest=lambda probs, q: probs),
    ),
    "EitherRule": (
        "A draft is accepted if it equals the target's draw or passes the ratio test.",
        Faulty(test=lambda u, p, q, probs: u < 1 - (1 - p) * (1 - jnp.minimum(1, p / jnp.where(q > 0, q, 1)))),
    ),
    "EpsilonInRatio": ("A constant 1e-2 is added to q in the ratio.", _epsilon(1e-2)),
    "SmallEpsilonInRatio": ("A constant 1e-3 is added to q in the ratio.", _epsilon(1e-3)),
    "NotStrict": (
        "u q <= p: at u = 0 a token of probability 0 is accepted.", Faulty(test=lambda u, p, q, probs: u * q <= p),
    ),
    "Typical": ("Typical acceptance, which is approximate.", Typical()),
    "Lenient": ("Lenience 0.9.", Lenient()),
    "SlightlyLenient": ("Lenience 0.99.", Lenient(0.99)),
    "SharedUniform": (
        "One uniform for all positions of a window.",
        FaultyNoise(lambda u, draft: jnp.broadcast_to(u[:, :1], u.shape)),
    ),
    "RowZeroUniform": (
        "Every row is given row 0's uniforms: each law is right, but sequences aren't independent.",
        FaultyNoise(lambda u, draft: jnp.broadcast_to(u[:1], u.shape)),
    ),
    "AcceptanceNoiseReused": (
        "The uniform that rejected a draft also inverts the residual's distribution function.",
        FaultyNoise(bonus=_reject_again),
    ),
    "DraftNoiseReused": (
        "The residual is drawn with the very noise that drew the rejected draft.", FaultyNoise(bonus=_draw_again),
    ),
    "DraftUniformReused": ("The uniform that drew the draft by inversion also tests it.", FaultyNoise(_inverting)),
    "BonusFromResidual": (
        "After a full acceptance the bonus token is drawn from max(p - q, 0), q of the last draft.",
        _bonus(lambda probs, p, q: normalise(jnp.maximum(probs - q, 0), probs)),
    ),
    "BonusFromDraft": (
        "After a full acceptance the bonus token is drawn from the drafter's last law.", _bonus(lambda probs, p, q: q),
    ),
    "BonusFromPreviousRow": (
        "After a full acceptance the bonus token is drawn from the row before the last.", _bonus(lambda probs, p, q: p),
    ),
    "ResidualNextRow": (
        "The residual is made of the row after the rejected draft's.",
        _residual(lambda p, q, here: normalise(jnp.maximum(p - q, 0), p), offset=1),
    ),
    "RowOfPOff": ("Draft i is tested against row i + 1 of p.", Faulty(given=_p_off)),
    "RowOfQOff": ("Draft i is tested with row i - 1 of q.", Faulty(given=_q_off)),
    "ResidualNotNormalised": (
        "The residual's distribution function is inverted without dividing by its mass: the last id takes the rest.",
        _residual(_unnormalised),
    ),
    "ResidualAtDraftOnly": (
        "The residual takes q away at the rejected token alone.",
        _residual(lambda p, q, here: normalise(jnp.where(here, jnp.maximum(p - q, 0), p), p)),
    ),
    "FirstAlwaysAccepted": (
        "The first draft is kept without a test.",
        Faulty(given=lambda log_p, draft, live, u: (log_p, draft, live, u.at[:, 0].set(0))),
    ),
    "NoBreak": (
        "Drafts behind a rejected one are still tested, and the last accepted one wins.", Faulty(after=_no_break),
    ),
    "BudgetIgnored": (
        "Padding and tokens past the budget are tested, and counted, like drafts.",
        Faulty(given=lambda log_p, draft, live, u: (log_p, draft, jnp.ones_like(live), u)),
    ),
    "BlockWithBreak": ("Block verification that stops at the first failure.", BlockWithBreak()),
    "BlockTokenResidual": ("Block verification that redraws from max(p - q, 0).", BlockTokenResidual()),
    "LastRatioUncapped": (
        "Hierarchical verification with the joint ratio of the last draft left uncapped.", LastRatioUncapped(),
    ),
}  # fmt: skip
"""Every fault of verification by name: what is computed, and the rule that does so. The block rules come last."""
