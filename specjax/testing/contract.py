"""The rules that every drafter keeps, as one call: `check_drafter(Mine())`.

A drafter is run on a tiny target, some rounds into a batch of three rows at temperatures 1, 0.7 and 0. Then everything
that it must not read is filled with garbage, what it must not write is compared bit by bit, its draws are counted
against the probabilities that it reports, and its training hook is held against what it drafts. It takes seconds.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from specjax import cache as kv
from specjax import decode, sampling
from specjax.drafter import Drafter, Nothing, Wrapper
from specjax.state import DraftError
from specjax.testing.differences import (
    GARBAGE,
    broken,
    compare,
    copy,
    expect,
    fill_garbage,
    keeps,
    pairs,
    real_nodes,
    same_draft,
    same_state,
)  # fmt: skip
from specjax.testing.targets import tiny_model
from specjax.types import Cache, Draft, Model, Params, Prompts, Seen, Target, Text

CAPACITY, NEW_TOKENS, LATE = 64, 30, 6
TEMPERATURES = (1.0, 0.7, 0.0)
SMALL_CHUNK = 4
DRAWS = 1024
CHANCE = 5.0  # standard deviations: one false alarm in a million


@dataclass(frozen=True)
class Trial:
    """A drafter in the middle of its work."""

    program: decode.Program
    params: Params
    weights: Params
    prompts: Prompts
    begun: PyTree[Array]  # its state after the prompts
    state: decode.State  # some rounds into the text

    @property
    def drafter(self) -> Drafter:
        """The drafter under test."""
        return self.program.drafter

    def propose(self, state: decode.State) -> Draft:
        """A draft from a state; a key that is consumed twice raises."""
        with jax.debug_key_reuse(True):
            return _propose(self.program, self.params, self.weights, state)


_propose = jax.jit(decode.propose, static_argnames="program")


def check_drafter(
    drafter: Drafter, *, target: tuple[Model, Params] | None = None, weights: Params | None = None, seed: int = 0
) -> None:
    """Hold a drafter to the rules of `specjax.drafter`.

    Args:
      target: the model and weights that it drafts for; by default a tiny decoder of 29 ids.
      weights: of the drafter; by default what its `params` gives.

    Raises:
      ContractError: the rule that is broken, and where.
    """
    model, params = target or tiny_model(
        num_layers=3, hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=29
    )
    drafter.check(model)
    check_value(drafter)
    if weights is None:
        weights = drafter.params(jax.random.key(seed), model, params)
    check_weights(drafter, weights, params)
    program, prompts = decode.Program(model, drafter), make_prompts(model.vocab_size, seed)
    check_shapes(program, params, weights, prompts)
    trial = begin(program, params, weights, prompts)
    for rule in (
        check_sums, check_reads, check_observes, check_writes, check_rows, check_draws, check_hook, check_greedy_text,
    ):  # fmt: skip
        rule(trial)


def make_prompts(vocab_size: int, seed: int) -> Prompts:
    """Three prompts of different lengths, at the three temperatures."""
    texts = [[token % vocab_size for token in text] for text in ([1], [3, 4, 5, 3, 4, 5], [7] * 8)]
    tokens = np.zeros((len(texts), CAPACITY), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    length = jnp.asarray([len(text) for text in texts], jnp.int32)
    return Prompts(
        tokens=jnp.asarray(tokens),
        length=length,
        limit=length + NEW_TOKENS,
        keys=sampling.row_keys(seed, range(len(texts))),
        end_ids=jnp.full((1,), -1, jnp.int32),
        sampling=sampling.make_sampling(len(texts), TEMPERATURES),
    )


def begin(program: decode.Program, params: Params, weights: Params, prompts: Prompts) -> Trial:
    """Read the prompts, and decode until every row has committed some tokens."""
    state = decode.start(program, params, weights, prompts, jnp.float32)
    begun = copy(state.drafter)
    while int((state.length - prompts.length).min()) < LATE:
        state = decode.step(program, params, weights, state)
    return Trial(program, params, weights, prompts, begun, state)


def check_value(drafter: Drafter) -> None:
    """A frozen value: equal to one built again, with the same hash, and it prints its fields."""
    try:
        again = dataclasses.replace(drafter)
        same = drafter == again and hash(drafter) == hash(again)
    except TypeError as error:
        broken(drafter, "is a frozen, hashable dataclass", str(error))
    if not same:
        broken(drafter, "equals one that is built again", f"{drafter!r} is not {again!r}: each would compile anew")
    if not drafter.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        broken(drafter, "is a frozen, hashable dataclass", "declare it with @dataclass(frozen=True)")


def check_weights(drafter: Drafter, weights: Params, target_params: Params) -> None:
    """Own weights, none of them the target's arrays."""
    theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(target_params)}
    for path, leaf in jax.tree_util.tree_flatten_with_path(weights)[0]:
        if leaf.unsafe_buffer_pointer() in theirs:
            where = f"{jax.tree_util.keystr(path)} is one: take it from `target.params` instead, or copy it"
            broken(drafter, "has no array of the target among its weights", where)


def check_shapes(program: decode.Program, params: Params, weights: Params, prompts: Prompts) -> None:
    """Drafts are as declared, and the state keeps tree, shapes, dtypes and weak types. Traced; nothing runs."""
    drafter = program.drafter
    build = functools.partial(decode.init_state, program, cache_dtype=jnp.float32)
    state = jax.eval_shape(build, params, weights, prompts)
    show = functools.partial(_show, program)
    _, shown = jax.eval_shape(show, params, weights, prompts, 0, state.cache, state.drafter)
    keeps(drafter, "observe", state.drafter, shown)
    try:
        draft = jax.eval_shape(functools.partial(decode.propose, program), params, weights, state)
        after = jax.eval_shape(functools.partial(decode.verify_and_commit, program), params, weights, state, draft)
    except DraftError as error:
        broken(drafter, "hands back what has the declared form", str(error))
    if draft.tokens.shape[1] != drafter.num_speculative_tokens:
        broken(drafter, "drafts `num_speculative_tokens` nodes", f"tokens are {list(draft.tokens.shape)}")
    keeps(drafter, "propose", (state.cache, state.drafter), (draft.cache, draft.state))
    keeps(drafter, "observe", state.drafter, after.drafter)


def check_sums(trial: Trial) -> None:
    """Counts are possible, and probabilities add up to 1."""
    drafter, draft = trial.drafter, trial.propose(trial.state)
    nodes = drafter.num_speculative_tokens
    if draft.count is not None and ((draft.count < 0) | (draft.count > nodes)).any():
        broken(drafter, f"counts 0 to {nodes} tokens", f"count is {draft.count.tolist()}")
    if draft.log_q is not None:
        off = np.abs(np.exp(np.asarray(draft.log_q, np.float64)).sum(-1) - 1)
        for row, node in np.argwhere((off > 1e-4) & np.asarray(real_nodes(draft)))[:1]:
            where = f"row {row}, token {node}: off by {off[row, node]}"
            broken(drafter, "reports probabilities that add up to 1", where)


def check_reads(trial: Trial) -> None:
    """A draft depends on committed tokens and slots, and on what of the state is not scratch."""
    state, drafter = trial.state, trial.drafter
    slot = jnp.arange(CAPACITY, dtype=jnp.int32)[None]
    spoilt = {
        "tokens at and beyond `length`": {"tokens": jnp.where(slot < state.length[:, None], state.tokens, 7)},
        "the target's slots at and beyond `length - 1`": {
            "cache": fill_garbage(state.cache, kv.scratch(state.cache, state.length - 1))
        },
        "what `scratch` declares of its state": {
            "drafter": fill_garbage(state.drafter, drafter.scratch(state.drafter, state.length))
        },
    }
    clean = trial.propose(state)
    for name, changes in spoilt.items():
        dirty = trial.propose(dataclasses.replace(state, **changes))
        same_draft(drafter, f"does not read {name}", clean, dirty)


def check_observes(trial: Trial) -> None:
    """What it learns depends on what is real of `seen`, in prompts and rounds, and not on how a prompt was cut."""
    drafter, program = trial.drafter, dataclasses.replace(trial.program, drafter=Misled(inner=trial.drafter))
    misled = begin(program, trial.params, trial.weights, trial.prompts).state
    rule = (
        "does not read what is not real of `seen`: tokens and hidden states beyond `count`, the target beyond its end"
    )
    compare(drafter, rule, "tokens", trial.state.tokens, misled.tokens)
    same_state(drafter, rule, trial.state.drafter, misled.drafter, trial.state.length)
    rule = "learns the same from a prompt in chunks"
    same_state(drafter, rule, trial.begun, _read(trial), trial.prompts.length + 1)


@dataclass(frozen=True)
class Misled(Wrapper):
    """A drafter that is shown garbage wherever nothing is real."""

    def observe(self, params: Params, state: PyTree[Array], seen: Seen) -> PyTree[Array]:
        target, steps = seen.target, jnp.arange(seen.tokens.shape[1], dtype=jnp.int32)[None]
        real = steps < seen.count[:, None]
        slot = jnp.arange(target.tokens.shape[1], dtype=jnp.int32)[None]
        unread = kv.scratch(target.cache, jnp.minimum(seen.start + seen.count, target.length))
        target = dataclasses.replace(
            target,
            tokens=jnp.where(slot < target.length[:, None], target.tokens, 7),
            cache=fill_garbage(target.cache, unread),
        )
        seen = dataclasses.replace(
            seen,
            target=target,
            tokens=jnp.where(real, seen.tokens, 7),
            hidden=tuple(jnp.where(real[..., None], tap, jnp.asarray(GARBAGE, tap.dtype)) for tap in seen.hidden),
        )
        return self.inner.observe(params, state, seen)


def check_writes(trial: Trial) -> None:
    """`propose` writes scratch only: the target's slots from `length - 1` on, and what its state declares."""

    def another(leaf: Array) -> Array:  # a value that it has written in every round before would pass unseen
        return leaf + 1 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    cache, own = (jax.tree.map(another, tree) for tree in (trial.state.cache, trial.state.drafter))
    state = dataclasses.replace(trial.state, cache=cache, drafter=own)
    draft = trial.propose(state)
    for name, before, after, scratch in (
        ("the target's cache", state.cache, draft.cache, kv.scratch(state.cache, state.length - 1)),
        ("its state", state.drafter, draft.state, trial.drafter.scratch(state.drafter, state.length)),
    ):
        for path, old, new, free in pairs(before, after, scratch):
            rule = f"writes only scratch of {name} in `propose`"
            compare(trial.drafter, rule, path, np.where(free, 0, old), np.where(free, 0, new))


def check_rows(trial: Trial) -> None:
    """A row's draft is its own: the same for the same key, whoever stands beside it."""
    state = trial.state
    clean = trial.propose(state)
    same_draft(trial.drafter, "drafts the same for the same keys", clean, trial.propose(state))
    turned = jax.tree.map(lambda leaf: leaf if leaf is state.end_ids else jnp.roll(leaf, 1, 0), state)
    moved = trial.propose(turned)
    rows = lambda leaf: None if leaf is None else jnp.roll(leaf, -1, 0)  # noqa: E731
    back = dataclasses.replace(
        moved, tokens=jnp.roll(moved.tokens, -1, 0), count=rows(moved.count), log_q=rows(moved.log_q)
    )
    same_draft(trial.drafter, "drafts for a row whatever the others are", clean, back)


def check_draws(trial: Trial) -> None:
    """Tokens are drawn from the very probabilities that are reported, filters included."""
    if not trial.drafter.num_speculative_tokens:
        return
    width = len(TEMPERATURES)
    filtered = sampling.make_sampling(width, TEMPERATURES, top_k=[0, 4, 0], top_p=[0.9, 1.0, 1.0])
    state = dataclasses.replace(trial.state, sampling=filtered)
    first = trial.propose(state)
    keys = jax.vmap(lambda seed: jax.vmap(jax.random.fold_in, (0, None))(state.keys, seed))(
        jnp.arange(DRAWS, dtype=jnp.uint32)
    )
    tokens, log_q, real = jax.device_get(_draw_often(trial.program, trial.params, trial.weights, state, keys))
    if first.log_q is None:
        if (tokens != np.asarray(first.tokens)[None]).any(where=real):
            broken(trial.drafter, "drafts certain tokens where it reports no `log_q`", "they differ between keys")
        return
    q = np.exp(log_q.astype(np.float64))
    chosen = np.take_along_axis(q, np.clip(tokens, 0, q.shape[-1] - 1)[..., None], -1)[..., 0]
    for draw, row, node in np.argwhere(real & ((chosen <= 0) | (tokens < 0) | (tokens >= q.shape[-1])))[:1]:
        where = f"draw {draw}, row {row}, token {node}: id {tokens[draw, row, node]} has probability 0"
        broken(trial.drafter, "draws from the `log_q` that it reports", where)
    hits, share = tokens == q.argmax(-1), q.max(-1)
    excess = np.where(real, hits - share, 0).sum(0)
    spread = np.sqrt(np.where(real, share * (1 - share), 0).sum(0))
    for row, node in np.argwhere(np.abs(excess) > CHANCE * spread + 1e-3)[:1]:
        where = (
            f"row {row}, token {node}: the likeliest was drawn {hits[:, row, node].sum()} times in {DRAWS}, "
            f"{share[:, row, node].sum():.0f} would be right: return the array that the token was drawn from"
        )
        broken(trial.drafter, "draws from the `log_q` that it reports", where)


@functools.partial(jax.jit, static_argnames=("program",))
def _draw_often(program: decode.Program, params: Params, weights: Params, state: decode.State, keys: Array) -> Any:
    def one(keys: Array) -> Any:
        draft = decode.propose(program, params, weights, dataclasses.replace(state, keys=keys))
        return draft.tokens, draft.log_q, real_nodes(draft)

    return jax.lax.map(one, keys)


def check_hook(trial: Trial) -> None:
    """`log_probs` gives of a text what `propose` reports when it drafts that text."""
    drafter, state, model = trial.drafter, trial.state, trial.program.model
    draft = trial.propose(state)
    if draft.log_q is None or draft.parents is not None:
        return
    at = state.length[:, None] + jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    tokens = state.tokens.at[jnp.arange(len(TEMPERATURES))[:, None], at].set(draft.tokens)
    start = jnp.zeros_like(state.length)

    @jax.jit
    def teacher_forced(params: Params, weights: Params) -> Array | None:
        hidden = model.forward(params, tokens, None, start, taps=drafter.tapped_layers(model)).taps
        text = Text(model, params, tokens, hidden, state.length[:, None] - 1, state.sampling)
        return drafter.log_probs(weights, text)

    found = teacher_forced(trial.params, trial.weights)
    if found is None:
        return
    expect(drafter, "log_probs", found, (len(TEMPERATURES), 1, *draft.log_q.shape[1:]), jnp.float32)
    rule = "has one arithmetic for `log_probs` and `propose`"
    compare(drafter, rule, "", np.exp(draft.log_q), np.exp(found[:, 0]), rtol=1e-3, atol=1e-4)


def check_greedy_text(trial: Trial) -> None:
    """Greedy text is the plain decoder's, whatever it drafts; an equal drafter, another temperature compile nothing."""
    greedy = sampling.make_sampling(len(TEMPERATURES))
    prompts = dataclasses.replace(trial.prompts, sampling=greedy)
    again = dataclasses.replace(trial.program, drafter=dataclasses.replace(trial.drafter))
    texts = []
    for program, weights in ((again, trial.weights), (decode.Program(trial.program.model, Nothing()), ())):
        state = decode.start(program, trial.params, weights, prompts, jnp.float32)
        compiled = decode.step._cache_size()  # type: ignore[attr-defined]
        while not state.done.all():
            state = decode.step(program, trial.params, weights, state)
        if program is again and decode.step._cache_size() > compiled:  # type: ignore[attr-defined]
            broken(trial.drafter, "compiles once", "an equal drafter at another temperature was compiled again")
        texts.append(state.tokens)
    compare(trial.drafter, "leaves greedy text as it is", "tokens", texts[1], texts[0])


def _read(trial: Trial) -> PyTree[Array]:
    """The drafter's state after the prompts, shown `SMALL_CHUNK` tokens at a time."""
    program, params, weights, prompts = trial.program, trial.params, trial.weights, trial.prompts
    empty = decode.empty(program, params, weights, prompts, cache_dtype=jnp.float32)
    cache, state = empty.cache, empty.drafter
    show = jax.jit(_show, static_argnames=("program",))
    for first in range(0, int(prompts.length.max()), SMALL_CHUNK):
        cache, state = show(program, params, weights, prompts, jnp.asarray(first, jnp.int32), cache, state)
    return state


def _show(
    program: decode.Program, params: Params, weights: Params, prompts: Prompts, first: Any, cache: Cache, state: Any
) -> tuple[Cache, PyTree[Array]]:
    """One chunk of the prompts: read by the target, then seen by the drafter."""
    start = jnp.full_like(prompts.length, first)
    count = jnp.clip(prompts.length - first, 0, SMALL_CHUNK)
    window = jax.lax.dynamic_slice_in_dim(prompts.tokens, first, SMALL_CHUNK, 1)
    out = program.model.forward(params, window, cache, start, taps=program.drafter.tapped_layers(program.model))
    target = Target(program.model, params, out.cache, prompts.tokens, prompts.length, prompts.sampling)
    return out.cache, program.drafter.observe(weights, state, Seen(target, window, start, count, out.taps))
