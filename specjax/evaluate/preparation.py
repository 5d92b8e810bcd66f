"""What `specjax compare` is about to do: prompts, drafters and settings, checked before weights are read."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax import offload, verify
from specjax.cli import options
from specjax.drafter import Drafter
from specjax.engine import capacity_for
from specjax.evaluate import measure, prompts, provenance
from specjax.evaluate.rows import BASELINE
from specjax.weights.checkpoint import sha256_of

DRAFTERS = ("none", "ngram", "early-exit", "fp8", "external")
SMALLEST_CAPACITY = 512  # a compilation costs as much as several prompts, unused slots a few percent


@dataclass(frozen=True)
class Plan:
    """All that decides a run, checked; no weights are loaded yet."""

    subject: options.Subject
    drafters: dict[str, Drafter]
    rule: verify.Rule
    source: prompts.PromptSet
    chosen: dict[str, prompts.Prompt]  # by question_id
    tokens: dict[str, list[int]]
    shared: measure.Options
    args: argparse.Namespace

    @property
    def greedy(self) -> bool:
        """Whether outputs must be equal."""
        return bool(self.args.temperature == 0)

    def capacity(self, question_id: str) -> int:
        """Cache slots for a prompt and its answer: one of few sizes."""
        window = max(drafter.num_speculative_tokens for drafter in self.drafters.values()) + 1
        needed = max(window, len(self.tokens[question_id]) + self.shared.max_new_tokens)
        return min(max(SMALLEST_CAPACITY, capacity_for(needed)), self.subject.model.context_length)

    def batches(self) -> list[list[str]]:
        """Prompts by capacity, then in the file's order, `--batch-size` together."""
        groups: dict[int, list[str]] = {}
        for name in self.chosen:
            groups.setdefault(self.capacity(name), []).append(name)
        size = self.args.batch_size
        return [group[i : i + size] for _, group in sorted(groups.items()) for i in range(0, len(group), size)]

    def batch(self, names: Sequence[str]) -> measure.Batch:
        """The batch of some prompts of equal capacity."""
        return measure.Batch(
            prompts=[self.tokens[name] for name in names],
            rows=[self.chosen[name].row for name in names],
            capacity=self.capacity(names[0]),
            size=self.args.batch_size,
        )


def make_plan(args: argparse.Namespace) -> Plan:
    """Check everything that can be checked before weights are read."""
    if args.offload:
        offload.check(args.offload)
    shared_sampler = options.make_sampling(args, args.batch_size)
    source = prompts.load(args.prompts)
    specs = list(dict.fromkeys([BASELINE, *(args.drafters or DRAFTERS)]))
    subject = options.open_subject(args)
    drafters = options.load_drafters(specs, args.settings, subject)
    chosen = _choose(source, subject, args)
    tokens = {prompt.question_id: subject.encode(prompt.text, args.system) for prompt in chosen}
    context = subject.model.context_length
    long = [name for name, ids in tokens.items() if len(ids) + args.max_new_tokens > context]
    if long:
        raise ValueError(
            f"{len(long)} prompts with max_new_tokens={args.max_new_tokens} exceed the target's context of {context} "
            f"tokens, the first is {long[0]} of {len(tokens[long[0]])} tokens: lower --max-new-tokens, or leave "
            "these prompts out"
        )
    return Plan(
        subject=subject,
        drafters=drafters,
        rule=verify.RULES[args.rule](),
        source=source,
        chosen={prompt.question_id: prompt for prompt in chosen},
        tokens=tokens,
        shared=measure.Options(args.max_new_tokens, args.seed, subject.tokenizer.end_ids, shared_sampler),
        args=args,
    )


def _choose(source: prompts.PromptSet, subject: options.Subject, args: argparse.Namespace) -> list[prompts.Prompt]:
    """What the arguments ask for; by default one short prompt of each kind."""
    if args.all or args.limit is not None:
        return prompts.select(source, args.category, None if args.all else args.limit)
    room = min(SMALLEST_CAPACITY, subject.model.context_length) - args.max_new_tokens
    short = [prompt for prompt in source.prompts if len(subject.encode(prompt.text, args.system)) <= room]
    if {prompt.category for prompt in short} >= set(args.category or source.categories):
        source = dataclasses.replace(source, prompts=tuple(short))
    return prompts.select(source, args.category, len(args.category) or len(source.categories))


def _drafter_files(drafters: dict[str, Drafter]) -> list[Path]:
    """Code that is not the package's, and weights that are not the target's."""
    code = [Path(options.split(name)[0].partition(":")[0]) for name in drafters]
    return [path for path in code if path.suffix == ".py"] + [path for each in drafters.values() for path in each.files]


def make_manifest(plan: Plan) -> dict[str, Any]:
    """What the run's tokens depend on."""
    args, subject = plan.args, plan.subject
    return {
        "command": ["specjax", *sys.argv[1:]],
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "target": {
            "name": subject.checkpoint.name,
            "sha256": subject.checkpoint.sha256,
            "dtype": subject.dtype,
            "config": dataclasses.asdict(subject.model.config),
        },
        "drafters": {name: repr(drafter) for name, drafter in plan.drafters.items()},
        "drafter_files": {str(path): sha256_of(path) for path in _drafter_files(plan.drafters)},
        "rule": repr(plan.rule),
        "prompts": {"file": plan.source.name, "sha256": plan.source.sha256, "question_ids": list(plan.chosen)},
        "sampling": {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")},
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "offload": args.offload,
        "system": args.system,
        "end_ids": list(plan.shared.end_ids),
        **provenance.describe(),
    }
