"""The host's side of decoding: checked prompts in, tokens and raw counts out.

engine = Engine(model, params, drafter)
for generation in engine.generate([ids], max_new_tokens=64, seed=0):
    print(generation.tokens, generation.counts.accepted)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, sampling, verify
from specjax import offload as offloading
from specjax.drafter import Drafter
from specjax.text import Tokenizer
from specjax.types import Counts, Model, Params, Prompts, Sampling

MAX_END_IDS = 8
SMALLEST_CAPACITY = 128


@dataclass(frozen=True)
class Generation:
    """One row's result. `counts` holds numpy arrays, one entry a round."""

    tokens: list[int]
    counts: Counts
    finish: str  # "end" (an end id was emitted), "length" (budget spent) or "not_finite"


class NotFiniteError(ArithmeticError):
    """The target's logits were NaN or infinite; `generations` holds what was emitted before."""

    def __init__(self, row: int, position: int, generations: list[Generation]):
        self.generations = generations
        super().__init__(
            f"target logits of row {row} are not finite at position {position}: "
            "check the checkpoint's weights, or use a wider dtype (--dtype float32)"
        )


class Engine:
    """A target, a drafter and a rule, ready to decode. Equal engines share compilations."""

    def __init__(
        self,
        model: Model,
        params: Params,
        drafter: Drafter,
        *,
        rule: verify.Rule | None = None,
        drafter_params: Params | None = None,
        drafter_seed: int = 0,
        cache_dtype: Any = None,
        tokenizer: Tokenizer | None = None,
        offload: str = "",
    ):
        """Check that the parts fit; with the target's tokenizer, an external drafter's is compared with it.

        Args:
          offload: `host` keeps the drafter's weights in host memory between drafts (`specjax.offload`).
        """
        drafter.check(model, tokenizer)
        if offload:
            offloading.check(offload)
        if drafter.num_speculative_tokens >= model.context_length:
            raise ValueError(
                f"num_speculative_tokens={drafter.num_speculative_tokens}: must be smaller than the target's "
                f"context of {model.context_length} tokens"
            )
        self.params = params
        if drafter_params is None:
            drafter_params = drafter.params(jax.random.key(drafter_seed), model, params)
        if offload and jax.tree.leaves(drafter_params):
            drafter, drafter_params = offloading.Offloaded(inner=drafter), offloading.to_host(drafter_params)
        self.drafter_params = drafter_params
        self.program = decode.Program(model, drafter, rule or verify.Token())
        self.cache_dtype = jnp.dtype(cache_dtype or jax.tree.leaves(params)[0].dtype)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        seed: int,
        rows: Sequence[int] | None = None,
        end_ids: Sequence[int] = (),
        sampler: Sampling | None = None,
        capacity: int | None = None,
    ) -> decode.State:
        """Prefill `prompts` and emit each one's first token.

        Args:
          prompts: token ids, one sequence a row, of any lengths.
          max_new_tokens: budget of each row; it is never exceeded.
          seed, rows: a row's randomness comes from `(seed, rows[i])` alone (rows are numbered by default).
          end_ids: ids after which a row is finished; the id itself is emitted.
          capacity: cache slots; by default the next power of two that holds the longest row. Batches of
            equal capacity and size share a compilation.

        Raises:
          ValueError: an empty prompt, an id out of range, a prompt that does not fit.
        """
        model = self.program.model
        longest = _check(prompts, max_new_tokens, end_ids, model)
        capacity = capacity or min(capacity_for(longest), model.context_length)
        if longest > capacity:
            raise ValueError(
                f"a prompt and max_new_tokens={max_new_tokens} need {longest} cache slots, more than the capacity "
                f"{capacity} (the target's context is {model.context_length}): shorten the prompt or ask for less"
            )
        if self.program.drafter.num_speculative_tokens >= capacity:
            raise ValueError(
                f"num_speculative_tokens={self.program.drafter.num_speculative_tokens}: the window does not fit into "
                f"{capacity} cache slots"
            )
        tokens = np.zeros((len(prompts), capacity), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        length = np.asarray([len(prompt) for prompt in prompts], np.int32)
        ends = np.full((MAX_END_IDS,), -1, np.int32)
        ends[: len(end_ids)] = list(end_ids)
        batch = Prompts(
            tokens=jnp.asarray(tokens),
            length=jnp.asarray(length),
            limit=jnp.asarray(length + np.int32(max_new_tokens)),
            keys=sampling.row_keys(seed, range(len(prompts)) if rows is None else rows),
            end_ids=jnp.asarray(ends),
            sampling=sampler or sampling.make_sampling(len(prompts)),
        )
        return decode.start(
            self.program, self.params, self.drafter_params, batch, self.cache_dtype, longest=int(length.max())
        )

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Generation]:
        """Decode a batch to its end. Options are those of `start`.

        Raises:
          NotFiniteError: NaN or infinite target logits; it carries what was emitted before.
        """
        state = self.start(prompts, **options)
        return self.results(decode.run(self.program, self.params, self.drafter_params, state), prompts)

    def stream(self, prompt: Sequence[int], **options: Any) -> Generator[list[int], None, Generation]:
        """Decode one prompt and yield each round's tokens; the generator's value is its `Generation`."""
        state = self.start([prompt], **options)
        seen = len(prompt)
        while True:
            tokens, length, done = jax.device_get((state.tokens[0], state.length[0], state.done[0]))
            if length > seen:
                yield tokens[seen:length].tolist()
                seen = int(length)
            if done:
                return self.results(state, [prompt])[0]
            state = decode.step(self.program, self.params, self.drafter_params, state)

    def results(self, state: decode.State, prompts: Sequence[Sequence[int]]) -> list[Generation]:
        """Bring a finished state to the host, checked."""
        got = jax.device_get(
            {name: getattr(state, name) for name in ("tokens", "length", "bad", "round", "end_ids", "counts")}
        )
        generations = []
        for row, prompt in enumerate(prompts):
            rounds = int(got["round"][row]) - 1
            tokens = got["tokens"][row, len(prompt) : got["length"][row]].tolist()
            counts = Counts(**{f.name: getattr(got["counts"], f.name)[row, :rounds] for f in fields(Counts)})
            ended = bool(tokens) and tokens[-1] in got["end_ids"]
            finish = "not_finite" if got["bad"][row] else "end" if ended else "length"
            generations.append(Generation(tokens, counts, finish))
        if got["bad"].any():
            row = int(np.argmax(got["bad"]))
            raise NotFiniteError(row, int(got["length"][row]), generations)
        return generations


def capacity_for(tokens: int) -> int:
    """Cache slots for a row of `tokens`: a power of two, so that few shapes are compiled."""
    capacity = SMALLEST_CAPACITY
    while capacity < tokens:
        capacity *= 2
    return capacity


def _check(prompts: Sequence[Sequence[int]], max_new_tokens: int, end_ids: Sequence[int], model: Model) -> int:
    if not prompts:
        raise ValueError("no prompts: give at least one")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 0")
    if len(end_ids) > MAX_END_IDS:
        raise ValueError(f"{len(end_ids)} end ids: at most {MAX_END_IDS} are supported")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: give at least one token (a chat template or a BOS token does)")
        if not all(0 <= token < model.vocab_size for token in prompt):
            raise ValueError(f"prompt {row} has a token outside of the vocabulary of {model.vocab_size}")
        if len(prompt) + max_new_tokens > model.context_length:
            raise ValueError(
                f"prompt {row} of {len(prompt)} tokens and max_new_tokens={max_new_tokens} exceed the target's context "
                f"of {model.context_length}: shorten the prompt or lower max_new_tokens"
            )
    return max(len(prompt) for prompt in prompts) + max_new_tokens
