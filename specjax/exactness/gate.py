"""The enumeration gate: the law of a rule, computed instead of sampled.

The rule's own `decide` runs over every draft and every pattern of acceptances, with uniforms injected on
both sides of each threshold; the threshold is found by bisection, so that no rule is taken at its word.
Weighted with the drafts' probabilities and completed by the target, the result must be the target's
joint law to rounding. It sees what no affordable sample can: a draft drawn in bf16 against a float32 q
needs 10^7 samples, lenience 0.99 5 * 10^5.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import verify
from specjax.types import Cache, Draft

Law = Callable[[tuple[int, ...]], np.ndarray]
Outcome = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # path, accepted, law, overlap
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
BISECTIONS = {"float64": 55, "float32": 30}


@dataclass(frozen=True)
class Proposal:
    """How drafts of a topology are drawn, and what is reported about it.

    `drawn(ancestors, elder siblings)` is the law that a node is really drawn from, `reported` the law
    that the drafter hands over (by default the same). `certain` reports no law at all.
    """

    parents: tuple[int, ...]
    drawn: Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]
    reported: Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray] | None = None
    certain: bool = False


def chain(length: int, q: Law, reported: Law | None = None, certain: bool = False) -> Proposal:
    """A chain whose every token is drawn from `q` of what stands before it."""
    told = None if reported is None else lambda above, elder: reported(above)
    return Proposal(tuple(range(-1, length - 1)), lambda above, elder: q(above), told, certain)


def _drafts(p: Law, proposal: Proposal, vocab: int) -> tuple[np.ndarray, ...]:
    """Every draft [X, N] with its probability [X], log p [X, N + 1, V] and log q."""
    parents, nodes, found = proposal.parents, len(proposal.parents), []
    for draft in itertools.product(range(vocab), repeat=nodes):
        places = [(_above(draft, parents, parents[i]), _elder(draft, parents, i)) for i in range(nodes)]
        chance = 1.0
        for place, token in zip(places, draft, strict=True):
            chance = chance and chance * float(proposal.drawn(*place)[token])
        if chance > 0:
            row_q = [(proposal.reported or proposal.drawn)(*place) for place in places]
            row_p = [p(_above(draft, parents, i)) for i in range(-1, nodes)]
            found.append((draft, chance, row_p, row_q))
    tokens, weight, rows_p, rows_q = map(np.asarray, zip(*found, strict=True))
    with np.errstate(divide="ignore"):
        return tokens.astype(np.int32), weight, np.log(rows_p), np.log(rows_q.reshape(len(tokens), nodes, vocab))


def _above(draft: tuple[int, ...], parents: tuple[int, ...], node: int) -> tuple[int, ...]:
    return () if node < 0 else (*_above(draft, parents, parents[node]), draft[node])


def _elder(draft: tuple[int, ...], parents: tuple[int, ...], node: int) -> tuple[int, ...]:
    return tuple(draft[j] for j in range(node) if parents[j] == parents[node])


def applies(rule: verify.Rule) -> bool:
    """Whether `decide` says all of what `rule` does: its `verify` is the one that draws around it."""
    return isinstance(rule, verify.DecisionRule) and type(rule).verify is verify.DecisionRule.verify


def law_of(
    rule: verify.DecisionRule, p: Law, proposal: Proposal, vocab: int, dtype: str = "float64"
) -> tuple[np.ndarray, float]:
    """`enumerate_round`, without the overlap."""
    return enumerate_round(rule, p, proposal, vocab, dtype)[:2]


def enumerate_round(
    rule: verify.DecisionRule, p: Law, proposal: Proposal, vocab: int, dtype: str = "float64"
) -> tuple[np.ndarray, float, float]:
    """The joint law of one round's tokens, completed by the target, the mean number accepted, and the mean overlap.

    Args:
      p: the target's law after a context.

    Raises:
      ValueError: an acceptance that is not decided by a threshold.
      NotAChainError: a tree, for a rule that takes none.
    """
    nodes = len(proposal.parents)
    patterns = np.array(list(itertools.product((False, True), repeat=nodes)), bool).reshape(-1, nodes)
    drafts = _drafts(p, proposal, vocab)
    tokens, weight, log_p, log_q = (part.repeat(len(patterns), 0) for part in drafts)
    with jax.enable_x64(dtype == "float64"):
        is_chain = proposal.parents == tuple(range(-1, nodes - 1))
        parents = None if is_chain else jnp.asarray(proposal.parents, jnp.int32)
        told = None if proposal.certain else jnp.asarray(log_q, dtype)
        draft, given = Draft(jnp.asarray(tokens), told, Cache(()), (), parents=parents), jnp.asarray(log_p, dtype)

        def run(u: np.ndarray) -> Outcome:
            return jax.device_get(_decide(rule, given, draft, jnp.asarray(u, dtype)))

        wanted = np.tile(patterns, (len(drafts[0]), 1))
        chance, (path, accepted, law, overlap), monotone = _patterns(run, wanted, dtype)
    if not monotone.all():
        raise ValueError(
            f"rule {rule!r}: a node must be accepted exactly for uniforms below some threshold; "
            "write it as u * q < p, so that its law can be computed"
        )
    weight = weight * chance
    depth = 1 + max((len(_above((0,) * nodes, proposal.parents, i)) for i in range(nodes)), default=0)
    joint = np.zeros((vocab,) * depth)
    rest = functools.cache(lambda prefix: target_joint(p, vocab, depth - len(prefix), prefix))
    for row in np.flatnonzero(weight > 0):
        taken = tuple(int(tokens[row, node]) for node in path[row, : accepted[row]])
        if len(taken) >= depth:  # more tokens than any path has: their mass is missing, so that the law is another one
            continue
        for token in np.flatnonzero(law[row] > 0):
            prefix = (*taken, int(token))
            joint[prefix] += weight[row] * float(law[row, token]) * rest(prefix)
    return joint, float(np.sum(weight * accepted)), float(np.sum(weight * overlap))


@functools.partial(jax.jit, static_argnums=0)
def _decide(rule: verify.DecisionRule, log_p: jax.Array, draft: Draft, u: jax.Array) -> Any:
    verdict = rule.decide(log_p, draft, jnp.ones(draft.tokens.shape, bool), u)
    return verdict.path, verdict.accepted, verdict.probs, verdict.overlap


def _patterns(
    run: Callable[[np.ndarray], Outcome], wanted: np.ndarray, dtype: str
) -> tuple[np.ndarray, Outcome, np.ndarray]:
    """Probability of each pattern of acceptances, the verdict it leads to, and whether thresholds are thresholds.

    Node by node, those behind it failing: a rule that lets a later node decide for an earlier one is seen as it is.
    """
    almost_one = 1 - float(np.finfo(dtype).epsneg)
    rows, nodes = wanted.shape
    u, chance, monotone = np.full(wanted.shape, almost_one), np.ones(rows), np.ones(rows, bool)

    for node in range(nodes):

        def accepts(value: np.ndarray | float, node: int = node) -> np.ndarray:
            u[:, node] = value
            return (run(u)[0] == node).any(1)

        ever, always = accepts(0.0), accepts(almost_one)  # unreached or impossible nodes are never accepted
        low, high = np.zeros(rows), np.ones(rows)
        for _ in range(BISECTIONS[dtype]):
            inside = accepts((low + high) / 2)
            low, high = np.where(inside, (low + high) / 2, low), np.where(inside, high, (low + high) / 2)
        threshold = np.where(always, 1, np.where(ever, (low + high) / 2, 0))
        for value in np.linspace(0.03, 0.97, 5):
            monotone &= (np.abs(threshold - value) < 1e-3) | (accepts(value) == (value < threshold))
        chance *= np.where(wanted[:, node], threshold, 1 - threshold)
        u[:, node] = np.where(wanted[:, node] & ever, threshold / 2, np.minimum((1 + threshold) / 2, almost_one))
    return chance, run(u), monotone


def target_joint(p: Law, vocab: int, length: int, context: tuple[int, ...] = ()) -> np.ndarray:
    """The target's own joint law of `length` tokens after `context`."""
    if length == 0:
        return np.ones(())
    law = p(context)
    return np.stack([law[x] * target_joint(p, vocab, length - 1, (*context, x)) for x in range(vocab)])


def accepts_impossible(rule: verify.DecisionRule) -> int:
    """How many drafts of probability 0 are accepted at u = 0, the one value where `<` and `<=` differ."""
    found = 0
    for q, tokens in itertools.product((1e-6, 0.3, 1.0), ((0,), (0, 1), (1, 0))):
        log_q = jnp.log(jnp.asarray([[[q, (1 - q) / 2, (1 - q) / 2]] * len(tokens)], jnp.float32))
        log_p = jnp.log(jnp.asarray([[[0.0, 0.5, 0.5]] * (len(tokens) + 1)], jnp.float32))
        draft = Draft(jnp.asarray([tokens], jnp.int32), log_q, Cache(()), ())
        verdict = rule.decide(log_p, draft, jnp.ones((1, len(tokens)), bool), jnp.zeros((1, len(tokens))))
        found += int(verdict.accepted[0] > tokens.index(0))
    return found
