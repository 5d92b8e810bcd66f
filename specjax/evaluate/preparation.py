"""What a comparison is about to do: prompts, drafters and settings, checked before weights are read."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from specjax import offload, sampling, verify
from specjax.drafter import Drafter
from specjax.engine import LanguageModel, capacity_for, load_target
from specjax.evaluate import measure, prompts, provenance
from specjax.evaluate.comparison import Comparison
from specjax.weights.checkpoint import sha256_of

SMALLEST_CAPACITY = 512  # a compilation costs as much as several prompts, unused slots a few percent


@dataclass(frozen=True)
class Task:
    """A comparison whose parts were opened and fit together; no weights are loaded yet."""

    comparison: Comparison
    target: LanguageModel
    drafters: dict[str, Drafter]
    rule: verify.Rule
    source: prompts.PromptSet
    chosen: dict[str, prompts.Prompt]  # by question_id
    tokens: dict[str, list[int]]
    shared: measure.Options

    @property
    def total(self) -> int:
        """Results that it will have."""
        return len(self.drafters) * len(self.chosen)

    def capacity(self, question_id: str) -> int:
        """Cache slots for a prompt and its answer: one of few sizes."""
        window = max(drafter.num_speculative_tokens for drafter in self.drafters.values()) + 1
        needed = max(window, len(self.tokens[question_id]) + self.shared.max_new_tokens)
        return min(max(SMALLEST_CAPACITY, capacity_for(needed)), self.target.model.context_length)

    @property
    def capacities(self) -> list[int]:
        """Cache slots that are compiled for, from the fewest."""
        return sorted({self.capacity(name) for name in self.chosen})

    def batches(self) -> list[list[str]]:
        """Prompts by capacity, then in the file's order, `batch_size` together."""
        groups: dict[int, list[str]] = {}
        for name in self.chosen:
            groups.setdefault(self.capacity(name), []).append(name)
        size = self.comparison.batch_size
        return [group[i : i + size] for _, group in sorted(groups.items()) for i in range(0, len(group), size)]

    def batch(self, names: Sequence[str]) -> measure.Batch:
        """The batch of some prompts of equal capacity."""
        return measure.Batch(
            prompts=[self.tokens[name] for name in names],
            rows=[self.chosen[name].row for name in names],
            capacity=self.capacity(names[0]),
            size=self.comparison.batch_size,
        )

    def manifest(self) -> dict[str, Any]:
        """What the run's tokens depend on."""
        comparison, target = self.comparison, self.target
        config = dataclasses.asdict(target.model)  # type: ignore[call-overload]
        return {
            "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "target": {
                "name": target.name,
                "sha256": target.fingerprint.sha256,
                "dtype": target.dtype,
                "config": config.get("config", config),  # a Llama's sizes are a field of it
            },
            "drafters": {name: repr(drafter) for name, drafter in self.drafters.items()},
            "drafter_files": {str(path): sha256_of(path) for path in self._files()},
            "rule": repr(self.rule),
            "prompts": {"file": self.source.name, "sha256": self.source.sha256, "question_ids": list(self.chosen)},
            "sampling": comparison.sampling,
            **{
                name: getattr(comparison, name)
                for name in ("seed", "max_new_tokens", "batch_size", "offload", "system")
            },
            "end_ids": list(self.shared.end_ids),
            **provenance.describe(),
        }

    def _files(self) -> list[Path]:
        """Code that is not the package's, and weights that are not the target's."""
        kinds = [type(part) for part in (*self.drafters.values(), self.rule)]
        names = [kind.__module__ for kind in kinds if not kind.__module__.startswith("specjax.")]
        code = [Path(path) for name in names if (path := getattr(sys.modules[name], "__file__", None))]
        return code + [path for drafter in self.drafters.values() for path in drafter.files]


def prepare(comparison: Comparison) -> Task:
    """Open everything, and check all that can be checked before weights are read.

    Raises:
      ValueError: with the part that does not fit, and what would.
    """
    if comparison.offload:
        offload.check(comparison.offload)
    sampling.make_sampling(comparison.batch_size, **comparison.sampling)
    source = prompts.load(comparison.prompts)
    target = comparison.target
    if isinstance(target, str):
        target = load_target(target, dtype=comparison.dtype)
    if comparison.dtype not in (None, target.dtype):
        raise ValueError(f"dtype={comparison.dtype!r}: the target was opened in {target.dtype}; open it in the other")
    drafters = comparison.strategies
    for drafter in drafters.values():
        target.check(drafter)
    chosen = {prompt.question_id: prompt for prompt in _choose(source, target, comparison)}
    if comparison.batch_size > len(chosen):
        raise ValueError(f"batch_size={comparison.batch_size}: there are {len(chosen)} prompts to decode together")
    tokens = {name: target.encode(prompt.text, comparison.system) for name, prompt in chosen.items()}
    _check_lengths(tokens, comparison.max_new_tokens, target.model.context_length)
    return Task(
        comparison=comparison,
        target=target,
        drafters=drafters,
        rule=cast(verify.Rule, comparison.rule),
        source=source,
        chosen=chosen,
        tokens=tokens,
        shared=measure.Options(comparison.max_new_tokens, comparison.seed, target.end_ids, comparison.sampling),
    )


def _check_lengths(tokens: dict[str, list[int]], max_new_tokens: int, context: int) -> None:
    long = [name for name, ids in tokens.items() if len(ids) + max_new_tokens > context]
    if long:
        raise ValueError(
            f"{len(long)} prompts with max_new_tokens={max_new_tokens} exceed the target's context of {context} "
            f"tokens, the first is {long[0]} of {len(tokens[long[0]])} tokens: lower --max-new-tokens, or leave "
            "these prompts out"
        )


def _choose(source: prompts.PromptSet, target: LanguageModel, comparison: Comparison) -> list[prompts.Prompt]:
    """What is asked for; by default one short prompt of each kind of a file."""
    kinds = comparison.categories
    if comparison.all or comparison.limit is not None or isinstance(comparison.prompts, tuple):
        return prompts.select(source, kinds, comparison.limit)
    room = min(SMALLEST_CAPACITY, target.model.context_length) - comparison.max_new_tokens
    short = [prompt for prompt in source.prompts if len(target.encode(prompt.text, comparison.system)) <= room]
    if {prompt.category for prompt in short} >= set(kinds or source.categories):
        source = dataclasses.replace(source, prompts=tuple(short))
    return prompts.select(source, kinds, len(kinds) or len(source.categories))
