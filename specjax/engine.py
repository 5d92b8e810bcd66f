"""The host's side of decoding: checked prompts in, tokens, text and raw counts out.

engine = Engine(load_target("smollm2-135m"), "ngram:num_speculative_tokens=7")
for generation in engine.generate(["Why is the sky blue?"], max_new_tokens=64, seed=0):
    print(generation.text, generation.counts.accepted)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, plugins, sampling, verify
from specjax.drafter import Drafter
from specjax.generation import Generation, Generations, NotFiniteError
from specjax.language_model import MAX_END_IDS, LanguageModel, load_target
from specjax.types import Counts, Model, Params, Prompts

__all__ = [
    "MAX_END_IDS", "Engine", "Generation", "Generations", "LanguageModel", "NotFiniteError", "capacity_for",
    "load_target",
]  # fmt: skip

SMALLEST_CAPACITY = 128

Prompt = str | Sequence[int]


class Engine:
    """A target, a drafter and a rule, ready to decode. Equal engines share compilations."""

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | str = "none",
        *,
        rule: verify.Rule | str = "token",
        drafter_params: Params | None = None,
        drafter_seed: int = 0,
        cache_dtype: Any = None,
    ):
        """Check that the parts fit, then read the weights.

        Args:
          drafter, rule: as values or as text (`specjax.plugins`).
          drafter_params: the drafter's own weights; by default its checkpoint's, or fresh ones from `drafter_seed`.
          cache_dtype: of the KV caches; by default that of the weights.
        """
        drafter = plugins.load_drafter(drafter) if isinstance(drafter, str) else drafter
        rule = plugins.load_rule(rule) if isinstance(rule, str) else rule
        target.check(drafter)
        self.target = target
        self.program = decode.Program(target.model, drafter, rule)
        self.params = target.params
        if drafter_params is None:
            drafter_params = drafter.params(jax.random.key(drafter_seed), target.model, self.params)
        self.drafter_params = drafter_params
        self.cache_dtype = jnp.dtype(cache_dtype or jax.tree.leaves(self.params)[0].dtype)
        if not jnp.issubdtype(self.cache_dtype, jnp.floating):
            raise ValueError(f"cache_dtype={cache_dtype!r}: must be a floating dtype, as bfloat16 or float32")

    def __repr__(self) -> str:
        return f"Engine({self.target!r}, {self.program.drafter!r}, rule={self.program.rule!r})"

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        seed: int,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        rows: Sequence[int] | None = None,
        end_ids: Sequence[int] | None = None,
        system: str | None = None,
        capacity: int | None = None,
    ) -> decode.State:
        """Prefill `prompts` and emit each one's first token.

        Args:
          prompts: text, which goes through the target's chat template, or token ids; one a row, of any lengths.
          max_new_tokens: budget of each row; it is never exceeded.
          seed, rows: a row's randomness comes from `(seed, rows[i])` alone (rows are numbered by default).
          temperature, top_k, top_p, min_p: applied in this order; one for all rows, or one a row. 0 is greedy.
          end_ids: ids after which a row is finished; the id itself is emitted. By default the tokenizer's.
          system: system prompt of those that are text.
          capacity: cache slots; by default the next power of two that holds the longest row. Batches of
            equal capacity and size share a compilation.

        Raises:
          ValueError: an empty prompt, an id or a setting out of range, a prompt that does not fit.
        """
        ids = self.encode(prompts, system)
        sampler = sampling.make_sampling(len(ids), temperature, top_k, top_p, min_p)
        end_ids = self.target.end_ids if end_ids is None else end_ids
        model, window = self.program.model, self.program.drafter.num_speculative_tokens
        longest = _check(ids, max_new_tokens, end_ids, model)
        capacity = capacity or min(capacity_for(longest), model.context_length)
        if longest > capacity:
            raise ValueError(
                f"a prompt and max_new_tokens={max_new_tokens} need {longest} cache slots, more than the capacity "
                f"{capacity} (the target's context is {model.context_length}): shorten the prompt or ask for less"
            )
        if window >= capacity:
            raise ValueError(f"num_speculative_tokens={window}: the window does not fit into {capacity} cache slots")
        tokens = np.zeros((len(ids), capacity), np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = prompt
        length = np.asarray([len(prompt) for prompt in ids], np.int32)
        ends = np.full((MAX_END_IDS,), -1, np.int32)
        ends[: len(end_ids)] = list(end_ids)
        batch = Prompts(
            tokens=jnp.asarray(tokens),
            length=jnp.asarray(length),
            limit=jnp.asarray(length + np.int32(max_new_tokens)),
            keys=sampling.row_keys(seed, range(len(ids)) if rows is None else rows),
            end_ids=jnp.asarray(ends),
            sampling=sampler,
        )
        return decode.start(
            self.program, self.params, self.drafter_params, batch, self.cache_dtype, longest=int(length.max())
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        seed: int,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        rows: Sequence[int] | None = None,
        end_ids: Sequence[int] | None = None,
        system: str | None = None,
        capacity: int | None = None,
    ) -> Generations:
        """Decode a batch to its end; arguments are those of `start`.

        Raises:
          NotFiniteError: NaN or infinite target logits; it carries what was emitted before.
        """
        ids = self.encode(prompts, system)
        state = self.start(
            ids, max_new_tokens=max_new_tokens, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, rows=rows, end_ids=end_ids, capacity=capacity,
        )  # fmt: skip
        return self.results(decode.run(self.program, self.params, self.drafter_params, state), ids)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        seed: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        row: int = 0,
        end_ids: Sequence[int] | None = None,
        system: str | None = None,
        capacity: int | None = None,
    ) -> Generator[list[int], None, Generation]:
        """Decode one prompt and yield each round's tokens; the generator's value is its `Generation`."""
        [ids] = self.encode([prompt], system)
        state = self.start(
            [ids], max_new_tokens=max_new_tokens, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, rows=[row], end_ids=end_ids, capacity=capacity,
        )  # fmt: skip
        seen = len(ids)
        while True:
            tokens, length, done = jax.device_get((state.tokens[0], state.length[0], state.done[0]))
            if length > seen:
                yield tokens[seen:length].tolist()
                seen = int(length)
            if done:
                return self.results(state, [ids])[0]
            state = decode.step(self.program, self.params, self.drafter_params, state)

    def results(self, state: decode.State, prompts: Sequence[Sequence[int]]) -> Generations:
        """Bring a finished state to the host, checked. `prompts` are the ids that it started from."""
        got = jax.device_get(
            {name: getattr(state, name) for name in ("tokens", "length", "bad", "round", "end_ids", "counts")}
        )
        tokenizer, generations = self.target.tokenizer, Generations()
        for row, prompt in enumerate(prompts):
            rounds = int(got["round"][row]) - 1
            tokens = got["tokens"][row, len(prompt) : got["length"][row]].tolist()
            counts = Counts(**{f.name: getattr(got["counts"], f.name)[row, :rounds] for f in fields(Counts)})
            ended = bool(tokens) and tokens[-1] in got["end_ids"]
            finish = "not_finite" if got["bad"][row] else "end" if ended else "length"
            text = None if tokenizer is None else tokenizer.decode(tokens)
            generations.append(Generation(tokens, counts, finish, text))
        if got["bad"].any():
            row = int(np.argmax(got["bad"]))
            raise NotFiniteError(row, int(got["length"][row]), generations)
        return generations

    def encode(self, prompts: Sequence[Prompt], system: str | None = None) -> list[Sequence[int]]:
        """Token ids of prompts that are text or ids.

        Raises:
          ValueError: one prompt instead of a sequence of them, or a text without a tokenizer.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, int | np.integer) for prompt in prompts):
            raise ValueError("prompts are a sequence of texts or of sequences of ids: put a single one into a list")
        return [self.target.encode(prompt, system) if isinstance(prompt, str) else prompt for prompt in prompts]


def capacity_for(tokens: int) -> int:
    """Cache slots for a row of `tokens`: a power of two, so that few shapes are compiled."""
    return max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())


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
