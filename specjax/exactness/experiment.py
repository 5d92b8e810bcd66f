"""What is sampled: a program and a target, under a panel of settings, and how a batch of it is laid out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from specjax import decode, sampling
from specjax.exactness.oracle import Joint, enumerate_joint
from specjax.exactness.subjects import Subject
from specjax.types import Params, Prompts, Sampling

BATCH = 1 << 10
"""Small: a batch decodes until its slowest row is done, and its arrays should stay in a core's cache."""


@dataclass(frozen=True)
class Setting:
    """One way of sampling, as the command line spells it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    weight: int = 1  # share of a batch

    def __str__(self) -> str:
        parts = [f"temperature {self.temperature:g}"]
        for name in ("top_k", "top_p", "min_p"):
            value = getattr(self, name)
            if value != (1.0 if name == "top_p" else 0):
                parts.append(f"{name.replace('_', '-')} {value:g}")
        return ", ".join(parts)

    def sampler(self, rows: int = 1) -> Sampling:
        """The same for every row."""
        return sampling.make_sampling(rows, self.temperature, self.top_k, self.top_p, self.min_p)


SETTINGS = (
    Setting(1.0, weight=3),
    Setting(0.7, top_p=0.8),
    Setting(1.0, top_k=2),
    Setting(1.0, min_p=0.1),
    Setting(0.0),
)
"""The default panel. Rows of all settings share a batch."""

WIDE = (
    Setting(1.0),
    Setting(0.0),
    Setting(1.5),
    Setting(1.3, top_k=3, top_p=0.8),
    Setting(1.2, top_k=3, min_p=0.15),
    Setting(0.9, top_p=0.9, min_p=0.2),
)
"""What the conditions are tested with: heat, and every pair of filters."""


@dataclass(frozen=True)
class Condition:
    """How texts are batched, and how long they are: what a drafter or a rule might depend on."""

    name: str
    rows: int = 0  # that decode together, under one setting; 0: a whole batch, its settings mixed
    longer: tuple[int, ...] = ()  # tokens put in front of the prompts, of contexts in turn
    share: float = 1.0  # sequences, as a part of those of the mixed batches


MIXED = Condition("mixed batches")
CONDITIONS = (
    Condition("one row a batch", rows=1, share=1 / 16),
    Condition("four rows alike a batch, long prompts", rows=4, longer=(20, decode.PREFILL_CHUNK + 3), share=1 / 16),
)
LATER = Condition("later tokens of mixed batches, by their transform", longer=(0, 2 * decode.PREFILL_CHUNK + 3))

Loop = Callable[[decode.Program, Params, Params, decode.State], decode.State]


@dataclass(frozen=True)
class Experiment:
    """A program, the target whose law it must have, and what it is fed. A case is a setting in a context."""

    program: decode.Program
    subject: Subject
    settings: Sequence[Setting] = SETTINGS
    drafter_seed: int = 0
    new_tokens: int = 0
    loop: Loop = decode.run
    end_id: int = -1  # behind it, a continuation is filled up with it
    condition: Condition = MIXED

    @property
    def length(self) -> int:
        """Tokens a sequence: one of prefill, a whole window, and one of a later round, as far as cells allow."""
        if self.new_tokens:
            return self.new_tokens
        length = self.program.drafter.num_speculative_tokens + 3
        while self.subject.tokens**length > 2048 and length > 3:
            length -= 1
        return length

    @property
    def names(self) -> list[str]:
        """Of the cases, in the order of their numbers."""
        contexts = self.contexts
        after = [f", after {_short(prompts[0])}" if len(contexts) > 1 else "" for prompts in contexts]
        kind = "" if self.condition == MIXED else f", {self.condition.name}"
        return [f"{setting}{place}{kind}" for place in after for setting in self.settings]

    @functools.cached_property
    def contexts(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The target's, or as many as the condition makes of them by longer prompts."""
        contexts, longer = self.subject.contexts, self.condition.longer
        if not longer:
            return contexts
        most = self.subject.model.context_length - self.length - max(len(c[-1]) for c in contexts)
        numbers = range(max(len(contexts), len(longer)))
        return tuple(
            ((*self._filler(min(longer[i % len(longer)], most)), *contexts[i % len(contexts)][-1]),) for i in numbers
        )

    def _filler(self, length: int) -> tuple[int, ...]:
        return tuple(i * i % self.subject.tokens for i in range(length))

    @functools.cached_property
    def joints(self) -> list[Joint]:
        """The exact law of each case."""
        target = self.subject
        laws = [
            enumerate_joint(target.model, target.params, prompts[-1], s.sampler(), self.length, target.tokens)
            for prompts in self.contexts
            for s in self.settings
        ]
        return laws if self.end_id < 0 else [law.stopped(self.end_id) for law in laws]


@dataclass(frozen=True)
class Cases:
    """The rows of a batch, every prompt under every setting, with the number of each one's case."""

    prompts: Prompts  # without keys: each batch has its own
    case: Int[np.ndarray, "B"]
    count: int

    def times(self, copies: int) -> Cases:
        """The same rows again and again, as cases of their own."""
        prompts = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * copies), self.prompts)
        case = np.concatenate([self.case + number * self.count for number in range(copies)])
        return Cases(replace(prompts, end_ids=self.prompts.end_ids), case.astype(np.int32), self.count * copies)


def make_cases(experiment: Experiment, batch: int = BATCH) -> Cases:
    """Lay out a batch. Each context has as many rows as every other, up to rounding."""
    contexts, settings = experiment.contexts, experiment.settings
    longest = max(map(len, contexts))
    rows = [
        (context * len(settings) + index, prompt, setting)
        for index, setting in enumerate(settings)
        for context, prompts in [*enumerate(contexts)]
        * max(experiment.condition.rows, 1)  # whole groups of one setting
        for prompt in (prompts * longest * setting.weight)[: longest * setting.weight]
    ]
    rows = [rows[i % len(rows)] for i in range(batch)]
    tokens = np.zeros((batch, max(len(prompt) for _, prompt, _ in rows) + experiment.length), np.int32)
    for row, (_, prompt, _) in enumerate(rows):
        tokens[row, : len(prompt)] = prompt
    columns = {
        name: [getattr(setting, name) for _, _, setting in rows] for name in ("temperature", "top_k", "top_p", "min_p")
    }
    length = jnp.array([len(prompt) for _, prompt, _ in rows], jnp.int32)
    prompts = Prompts(
        jnp.asarray(tokens), length, length + experiment.length, sampling.row_keys(0, range(batch)),
        jnp.full((1,), experiment.end_id, jnp.int32), sampling.make_sampling(batch, **columns),
    )  # fmt: skip
    return Cases(prompts, np.array([case for case, _, _ in rows], np.int32), len(contexts) * len(settings))


def _short(prompt: Sequence[int]) -> str:
    return str(list(prompt)) if len(prompt) < 12 else f"{len(prompt)} tokens"
