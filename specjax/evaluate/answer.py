"""One prompt, answered round by round: text as it is decoded, and then what the drafter was worth."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from specjax import decode, verify
from specjax.drafter import Drafter
from specjax.engine import Engine, Generation, LanguageModel, NotFiniteError, capacity_for
from specjax.evaluate import measure
from specjax.evaluate.preparation import SMALLEST_CAPACITY
from specjax.evaluate.record import Record
from specjax.evaluate.rows import Contender, make_rows
from specjax.sampling import make_sampling


@dataclass
class Answer:
    """An answer under way. `rounds` decodes it; what it was worth can be asked at any time after."""

    target: LanguageModel
    engine: Engine
    batch: measure.Batch
    shared: measure.Options
    state: decode.State = field(init=False)
    seconds: dict[str, float] = field(default_factory=dict)  # of compilation, prefill and decoding

    @classmethod
    def prepare(
        cls,
        target: LanguageModel,
        drafter: Drafter,
        prompt: str,
        *,
        rule: verify.Rule,
        max_new_tokens: int,
        seed: int,
        sampling: dict[str, Any],
        system: str | None = None,
        raw: bool = False,
    ) -> Answer:
        """Check everything, then read the weights.

        Args:
          sampling: `temperature`, `top_k`, `top_p`, `min_p`.
          raw: the prompt as it is, without the chat template.

        Raises:
          ValueError: something does not fit together.
        """
        if not prompt.strip():
            raise ValueError("the prompt is empty: give it some text")
        make_sampling(1, **sampling)
        target.check(drafter)
        tokens, context = target.encode(prompt, system, raw=raw), target.model.context_length
        if len(tokens) + max_new_tokens > context:
            raise ValueError(
                f"the prompt of {len(tokens)} tokens and max_new_tokens={max_new_tokens} exceed the target's context "
                f"of {context}: shorten the prompt or lower --max-new-tokens"
            )
        needed = max(len(tokens) + max_new_tokens, drafter.num_speculative_tokens + 1)
        capacity = min(max(SMALLEST_CAPACITY, capacity_for(needed)), context)
        engine = measure.make_engine(target, drafter, rule)
        shared = measure.Options(max_new_tokens, seed, target.end_ids, sampling)
        return cls(target, engine, measure.Batch([tokens], [0], capacity, 1), shared)

    def compile(self) -> float:
        """Compile all that `rounds` runs; returns the seconds that it took."""
        begin = time.perf_counter()
        jax.block_until_ready(self._step(measure.start(self.engine, self.batch, self.shared, max_new_tokens=0)))
        self.seconds["compile_s"] = time.perf_counter() - begin
        return self.seconds["compile_s"]

    def rounds(self, stop: Callable[[], bool] = lambda: False) -> Iterator[list[str]]:
        """Pieces of text, a round at a time, until all is said or `stop` asks for an end, where the state is whole."""
        begin = time.perf_counter()
        state = self.state = jax.block_until_ready(measure.start(self.engine, self.batch, self.shared))
        prefilled = time.perf_counter()
        assert self.target.tokenizer is not None  # it made the prompt's ids
        stream, seen = self.target.tokenizer.stream(), len(self.batch.prompts[0])
        while True:
            tokens, length, done = jax.device_get((state.tokens[0], state.length[0], state.done[0]))
            yield [stream.push(token) for token in tokens[seen:length].tolist()]
            seen = int(length)
            if done or stop():
                yield [stream.flush()]
                break
            state = self.state = self._step(state)
        self.seconds |= {"prefill_s": prefilled - begin, "decode_s": time.perf_counter() - prefilled}

    def _step(self, state: decode.State) -> decode.State:
        return decode.step(self.engine.program, self.engine.params, self.engine.drafter_params, state)

    def result(self) -> tuple[Generation, NotFiniteError | None]:
        """Tokens and counts so far, and what stopped them if logits were not finite."""
        try:
            return self.engine.results(self.state, self.batch.prompts)[0], None
        except NotFiniteError as error:
            return error.generations[0], error

    def row(self, name: str) -> tuple[dict[str, Any], str]:
        """The figures of the drafter `name`, as a comparison has them, and a title."""
        generation, _ = self.result()
        prompt, capacity = self.batch.prompts[0], self.batch.capacity
        contender = Contender.of(self.engine, 1, capacity)
        contender = dataclasses.replace(contender, compile_s=self.seconds["compile_s"])
        record = Record(
            question_id="prompt", category="prompt", drafter=name, prompt_tokens=len(prompt), capacity=capacity,
            batch_rows=1, session="", finish="", prefill_s=self.seconds["prefill_s"], decode_s=self.seconds["decode_s"],
            tokens=generation.tokens, text="", counts=generation.counts,
        )  # fmt: skip
        title = (
            f"{self.target.name}, {self.target.dtype}: {len(prompt)} prompt tokens in "
            f"{record.prefill_s:.2f} s, {len(generation.tokens)} new ones, finish: {generation.finish}"
        )
        [row] = make_rows({name: contender}, [record], greedy=False)
        del row["greedy_equal"]  # nothing to compare with
        return row, title
