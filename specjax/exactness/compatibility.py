"""Whether a rule, a drafter and a target fit together, found out by tracing: nothing is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, sampling, verify
from specjax.drafter import Drafter
from specjax.exactness.subjects import Subject
from specjax.types import Cache, Draft, Prompts, Verdict


def is_approximate(rule: verify.Rule) -> bool:
    """Rules that are known to change the law, and everything derived from them."""
    return isinstance(rule, (verify.Typical, verify.Lenient)) and not verify.is_exact(rule)


def can_draft(drafter: Drafter, subject: Subject) -> bool:
    """Whether `drafter` can serve this target at all."""
    try:
        drafter.check(subject.model)
        outline(decode.Program(subject.model, drafter), subject)
    except Exception:  # a researcher's drafter may refuse in any way
        return False
    return True


def outline(program: decode.Program, subject: Subject, slots: int = 16) -> tuple[Any, Any]:
    """Shapes of the tokens and of `log_q` that are drafted for two rows."""

    def propose(key: Any, params: Any) -> tuple[Any, Any]:
        own = program.drafter.params(key, subject.model, params)
        tokens, length = jnp.zeros((2, slots), jnp.int32), jnp.full((2,), 2, jnp.int32)
        ends, keys = jnp.full((1,), -1, jnp.int32), jax.random.split(key, 2)
        prompts = Prompts(tokens, length, length + 4, keys, ends, sampling.make_sampling(2))
        state = decode.start(program, params, own, prompts, jnp.float32)
        draft = decode.propose(program, params, own, state)
        return draft.tokens, draft.log_q

    return jax.eval_shape(propose, jax.random.key(0), subject.params)


def check_fit(program: decode.Program, subject: Subject) -> None:
    """Refuse a rule and a drafter that don't fit, naming what is wrong.

    Raises:
      ValueError: what is wrong, the rule, and the fix.
    """
    rule, drafter = program.rule, program.drafter
    drafter.check(subject.model)
    tokens, log_q = outline(program, subject)
    vocab, nodes = subject.model.vocab_size, tokens.shape[1]
    if tokens.shape != (2, nodes) or tokens.dtype != jnp.int32:
        raise ValueError(f"drafter {drafter}: tokens are {tokens.dtype}{tokens.shape}, must be int32 [B, N]")
    if log_q is not None and (log_q.shape != (2, nodes, vocab) or log_q.dtype != jnp.float32):
        raise ValueError(
            f"drafter {drafter}: log_q is {log_q.dtype}{list(log_q.shape)}, must be float32 [B, {nodes}, {vocab}] "
            "over the target's vocabulary: return the array that the tokens were drawn from, or None for point masses"
        )
    if isinstance(rule, verify.Lenient) and log_q is None and nodes:
        raise ValueError(
            f"rule {rule} compares p with a multiple of q, but drafter {drafter} proposes point masses without a q: "
            "use the rule token or match, or a drafter that reports log_q"
        )
    _check_rule(rule, vocab)


def _check_rule(rule: verify.Rule, vocab: int) -> None:
    try:
        hash(rule)
    except TypeError as error:
        raise ValueError(f"rule {rule!r} is not hashable: make it a frozen dataclass") from error
    if not isinstance(rule, verify.Rule):
        raise ValueError(f"rule {rule!r} lacks verify: see specjax.verify.Rule")
    law, tokens = jnp.zeros((2, 3, vocab)), jnp.zeros((2, 2), jnp.int32)
    draft = Draft(tokens, law[:, 1:], Cache(()), ())
    window = (jax.random.split(jax.random.key(0), 2), law, draft, tokens == 0)
    found, expected = (jax.eval_shape(kind.verify, *window) for kind in (rule, verify.Token()))
    for field in dataclasses.fields(Verdict):
        given, must = (getattr(verdict, field.name) for verdict in (found, expected))
        if (given.shape, given.dtype) != (must.shape, must.dtype):
            raise ValueError(f"rule {rule!r}: its verdict's {field.name} is {given}, must be {must}")
