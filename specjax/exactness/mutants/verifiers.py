"""Faulty verifiers: what the lab must be able to see (drafters, caches and loops: `faulty_drafters`, `faulty_loops`).

Each goes through the production round; its verification is replaced. Names say what is computed. `CONTROLS`
are unusual but right, and must pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling, verify
from specjax.exactness.block import block
from specjax.exactness.faulty_rules import FAULTY_RULES
from specjax.types import Draft, Keys, Verdict

Verifier = Callable[..., tuple[Verdict, Int[Array, "B"]]]


@dataclass(frozen=True)
class Mutant:
    """A fault, in one line, and the part that it replaces."""

    name: str
    fault: str
    rule: verify.Rule | None = None
    verifier: Verifier | None = None

    def verify(self, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
        """The verification that this mutant does."""
        rule = self.rule or verify.Token()
        return (self.verifier or verify.verify)(rule, keys, log_p, draft, live)


def _walk(keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    u = sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), draft.tokens.shape[1])
    return verify.walk(verify.Token(), log_p, draft, live, u), u


def _extra(keys: Keys, verdict: Verdict) -> tuple[Verdict, Array]:
    return verdict, sampling.draw(sampling.fold(keys, sampling.EXTRA), jnp.log(verdict.law))


def _full(verdict: Verdict, live: Array) -> Bool[Array, "B"]:
    """Rows whose every live draft was accepted."""
    return verdict.accepted == live.sum(-1, dtype=jnp.int32)


def _row(laws: Float[Array, "B S V"], index: Int[Array, "B"]) -> Float[Array, "B V"]:
    index = jnp.clip(index, 0, laws.shape[1] - 1)
    return jnp.take_along_axis(jnp.exp(laws), index[:, None, None], 1)[:, 0]


def _normalise(mass: Float[Array, "B V"], otherwise: Float[Array, "B V"]) -> Float[Array, "B V"]:
    total = mass.sum(-1, keepdims=True)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1), otherwise)


def shared_uniform(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """One uniform for all positions of a window."""
    u = sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), 1)
    return _extra(keys, verify.walk(rule, log_p, draft, live, jnp.broadcast_to(u, draft.tokens.shape)))


def row_zero_uniform(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """Every row is given row 0's uniforms: each law is right, but sequences aren't independent."""
    u = sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), draft.tokens.shape[1])
    return _extra(keys, verify.walk(rule, log_p, draft, live, jnp.broadcast_to(u[:1], u.shape)))


def acceptance_noise_reused(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """The uniform that rejected a draft also inverts the residual's distribution function."""
    verdict, u = _walk(keys, log_p, draft, live)
    last = jnp.take_along_axis(u, jnp.maximum(verdict.tested - 1, 0)[:, None], 1)
    picked = jnp.sum(jnp.cumsum(verdict.law, -1) <= last * verdict.law.sum(-1, keepdims=True), -1, dtype=jnp.int32)
    return verdict, jnp.where(_full(verdict, live), _extra(keys, verdict)[1], picked)


def draft_noise_reused(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """The residual is drawn with the very noise that drew the rejected draft."""
    verdict, _ = _walk(keys, log_p, draft, live)
    noise = sampling.fold(sampling.fold(keys, sampling.DRAFT), verdict.accepted)
    return verdict, sampling.draw(noise, jnp.log(verdict.law))


def draft_uniform_reused(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """The uniform that drew the draft by inversion also tests it."""
    assert draft.log_q is not None
    within = sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), draft.tokens.shape[1])
    q = jnp.exp(draft.log_q)
    chosen = jnp.take_along_axis(q, draft.tokens[..., None], -1)[..., 0]
    upper = jnp.take_along_axis(jnp.cumsum(q, -1), draft.tokens[..., None], -1)[..., 0]
    return _extra(keys, verify.walk(rule, log_p, draft, live, upper - chosen * within))


def extra_from_residual(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """After a full acceptance the further token is drawn from max(p - q, 0), q of the last draft."""
    assert draft.log_q is not None
    verdict, _ = _walk(keys, log_p, draft, live)
    rest = _normalise(jnp.maximum(verdict.law - _row(draft.log_q, verdict.accepted - 1), 0), verdict.law)
    full = (_full(verdict, live) & (verdict.accepted > 0))[:, None]
    return _extra(keys, replace(verdict, law=jnp.where(full, rest, verdict.law)))


def extra_from_draft(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """After a full acceptance the further token is drawn from the drafter's last law."""
    assert draft.log_q is not None
    verdict, _ = _walk(keys, log_p, draft, live)
    full = (_full(verdict, live) & (verdict.accepted > 0))[:, None]
    return _extra(keys, replace(verdict, law=jnp.where(full, _row(draft.log_q, verdict.accepted - 1), verdict.law)))


def extra_from_previous_row(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """After a full acceptance the further token is drawn from the row before the last."""
    verdict, _ = _walk(keys, log_p, draft, live)
    full = _full(verdict, live)[:, None]
    return _extra(keys, replace(verdict, law=jnp.where(full, _row(log_p, verdict.accepted - 1), verdict.law)))


def residual_next_row(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """The residual is made of the row after the rejected draft's."""
    assert draft.log_q is not None
    verdict, _ = _walk(keys, log_p, draft, live)
    index = jnp.minimum(verdict.accepted + 1, draft.tokens.shape[1] - 1)
    rest = _normalise(jnp.maximum(_row(log_p, index) - _row(draft.log_q, index), 0), verdict.law)
    return _extra(keys, replace(verdict, law=jnp.where(_full(verdict, live)[:, None], verdict.law, rest)))


def row_of_p_off(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """Draft i is tested against row i + 1 of p."""
    return verify.verify(rule, keys, jnp.concatenate([log_p[:, 1:], log_p[:, -1:]], 1), draft, live)


def row_of_q_off(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """Draft i is tested with row i - 1 of q."""
    assert draft.log_q is not None
    log_q = jnp.concatenate([draft.log_q[:, :1], draft.log_q[:, :-1]], 1)
    return verify.verify(rule, keys, log_p, replace(draft, log_q=log_q), live)


def residual_not_normalised(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """The residual's distribution function is inverted without dividing by its mass: the last id takes the rest."""
    assert draft.log_q is not None
    verdict, _ = _walk(keys, log_p, draft, live)
    mass = jnp.maximum(_row(log_p, verdict.accepted) - _row(draft.log_q, verdict.accepted), 0)
    mass = mass.at[:, -2].add(1 - mass.sum(-1))
    return _extra(keys, replace(verdict, law=jnp.where(_full(verdict, live)[:, None], verdict.law, mass)))


def residual_at_draft_only(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """The residual takes q away at the rejected token alone."""
    assert draft.log_q is not None
    verdict, _ = _walk(keys, log_p, draft, live)
    index = jnp.minimum(verdict.accepted, draft.tokens.shape[1] - 1)
    drafted = jnp.take_along_axis(draft.tokens, index[:, None], 1)
    here = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None] == drafted
    p = _row(log_p, index)
    rest = _normalise(jnp.where(here, jnp.maximum(p - _row(draft.log_q, index), 0), p), p)
    return _extra(keys, replace(verdict, law=jnp.where(_full(verdict, live)[:, None], verdict.law, rest)))


def first_always_accepted(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """The first draft is kept without a test."""
    u = sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), draft.tokens.shape[1])
    return _extra(keys, verify.walk(rule, log_p, draft, live, u.at[:, 0].set(0)))


def no_break(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """Drafts behind a rejected one are still tested, and the last accepted one wins."""
    assert draft.log_q is not None
    u = sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), draft.tokens.shape[1])
    p, q = (jnp.take_along_axis(laws, draft.tokens[..., None], -1)[..., 0] for laws in (log_p[:, :-1], draft.log_q))
    steps = jnp.arange(1, draft.tokens.shape[1] + 1, dtype=jnp.int32)[None]
    accepted = jnp.max(jnp.where(live & (u * jnp.exp(q) < jnp.exp(p)), steps, 0), -1)
    law = _row(log_p, accepted)
    rest = _normalise(jnp.maximum(law - _row(draft.log_q, accepted), 0), law)
    law = jnp.where((accepted == live.sum(-1, dtype=jnp.int32))[:, None], law, rest)
    return _extra(keys, _chain_verdict(draft, accepted, law))


def budget_ignored(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
    """Padding and tokens past the budget are tested, and counted, like drafts."""
    return verify.verify(rule, keys, log_p, draft, jnp.ones_like(live))


def _chain_verdict(draft: Draft, accepted: Int[Array, "B"], law: Float[Array, "B V"]) -> Verdict:
    steps = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    path = jnp.where(steps < accepted[:, None], steps, -1)
    return Verdict(path, accepted, law, accepted, jnp.zeros(accepted.shape, law.dtype))


def _block(**options: Any) -> Verifier:
    def verifier(rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
        u = sampling.uniforms(sampling.fold(keys, sampling.ACCEPT), draft.tokens.shape[1])
        return _extra(keys, _chain_verdict(draft, *block(log_p, draft, live, u, **options)))

    return verifier


VERIFIERS = [
    shared_uniform, row_zero_uniform, acceptance_noise_reused, draft_noise_reused, draft_uniform_reused,
    extra_from_residual, extra_from_draft, extra_from_previous_row, residual_next_row, row_of_p_off, row_of_q_off,
    residual_not_normalised, residual_at_draft_only, first_always_accepted, no_break, budget_ignored,
]  # fmt: skip

BLOCK_MUTANTS = [
    Mutant("block rule with break", "block verification that stops at the first failure", verifier=_block(stop=True)),
    Mutant(
        "block acceptance, token residual", "block verification that redraws from max(p - q, 0)",
        verifier=_block(token_residual=True),
    ),
    Mutant(
        "last ratio uncapped", "hierarchical verification with the joint ratio of the last draft left uncapped",
        verifier=_block(uncapped=True),
    ),
]  # fmt: skip

CONTROLS = [
    Mutant("token", "the production rule"),
    Mutant("match", "sample from the target, accept while equal", rule=verify.Match()),
    Mutant("block", "block verification", verifier=_block()),
    Mutant("hierarchical", "hierarchical verification as specified", verifier=_block(hierarchical=True)),
]

VERIFY_MUTANTS = (
    [Mutant(type(rule).__name__, (rule.__doc__ or "").strip().partition("\n")[0], rule=rule) for rule in FAULTY_RULES]
    + [Mutant(f.__name__, (f.__doc__ or "").partition("\n")[0], verifier=f) for f in VERIFIERS]
    + BLOCK_MUTANTS
)


@dataclass(frozen=True)
class Panel:
    """A verifier that gives each mutant an equal block of rows, in order: one compilation for all."""

    mutants: tuple[Mutant, ...]

    def __call__(self, rule: Any, keys: Keys, log_p: Array, draft: Draft, live: Array) -> tuple[Verdict, Array]:
        """Verify each block with its own mutant. Drafts are chains."""
        rows = live.shape[0] // len(self.mutants)
        results = []
        for number, mutant in enumerate(self.mutants):
            block = slice(number * rows, (number + 1) * rows)
            log_q = None if draft.log_q is None else draft.log_q[block]
            own = Draft(draft.tokens[block], log_q, draft.count[block], (), ())
            results.append(mutant.verify(keys[block], log_p[block], own, live[block]))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts).astype(parts[0].dtype), *results)
