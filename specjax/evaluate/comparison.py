"""A comparison as a value: all that decides its tokens, equal by value and printable, from a notebook or a command.

Comparison(drafters=["ngram", "ngram:prompt_lookup_max=2", MyDrafter()], limit=7, temperature=0.7)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specjax import plugins, verify
from specjax.drafter import Drafter, Nothing
from specjax.evaluate.rows import BASELINE
from specjax.language_model import LanguageModel

DEFAULT_TARGET = "smollm2-135m"
DRAFTERS = ("ngram", "early-exit", "fp8", "external")
LEAST = {"limit": 1, "max_new_tokens": 0, "batch_size": 1, "seed": 0}

Drafters = Mapping[str, Drafter] | Sequence[str | Drafter | tuple[str, Drafter]]


@dataclass(frozen=True)
class Comparison:
    """The same prompts with every drafter, in turn.

    Args:
      drafters: as text, as drafters, or by names of your own (a mapping, or pairs); `none` is always the first.
      prompts: a file in Spec-Bench's form, or texts; by default the prompts that come with specjax.
      limit, all: how many of them, a sample balanced over the kinds; by default one short prompt of each kind of a
        file, and all of several texts.
      offload: `host` keeps the drafters' weights in host memory between drafts.
    """

    target: str | LanguageModel = DEFAULT_TARGET
    drafters: Drafters = DRAFTERS
    rule: verify.Rule | str = "token"
    prompts: str | Sequence[str] | None = None
    categories: Sequence[str] = ()
    limit: int | None = None
    all: bool = False
    max_new_tokens: int = 48
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    system: str | None = None
    batch_size: int = 1
    offload: str = ""
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked alone, and bring every field into the form that is compared."""
        for name, least in LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        if self.all and self.limit is not None:
            raise ValueError(f"limit={self.limit} and all=True: give one of them")
        rule = plugins.load_rule(self.rule) if isinstance(self.rule, str) else self.rule
        values: dict[str, Any] = {"drafters": tuple(_named(self.drafters).items()), "rule": rule}
        values["categories"] = tuple(self.categories)
        if self.prompts is not None and not isinstance(self.prompts, str):
            values["prompts"] = tuple(self.prompts)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def strategies(self) -> dict[str, Drafter]:
        """Drafters by name, `none` first."""
        return _named(self.drafters)

    @property
    def sampling(self) -> dict[str, Any]:
        """How tokens are drawn."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def name_of(drafter: Drafter) -> str:
    """What a table calls a drafter: the text that names it on a command line, as far as there is one."""
    if isinstance(drafter, Nothing) and type(drafter) is Nothing:
        return BASELINE
    package, _, module = type(drafter).__module__.rpartition(".")
    name = module.replace("_", "-") if package == "specjax.drafters" else type(drafter).__name__
    settings = ",".join(
        f"{field.name}={value}"
        for field in dataclasses.fields(drafter)
        if (value := getattr(drafter, field.name)) != field.default
    )
    return f"{name}:{settings}" if settings else name


def _named(drafters: Drafters) -> dict[str, Drafter]:
    found: dict[str, Drafter] = {BASELINE: Nothing()}
    for entry in drafters.items() if isinstance(drafters, Mapping) else drafters:
        if isinstance(entry, Drafter):
            entry = name_of(entry), entry
        name, drafter = (entry, plugins.load_drafter(entry)) if isinstance(entry, str) else entry
        if found.setdefault(name, drafter) != drafter:
            raise ValueError(f"two drafters are named {name!r}: give a mapping, with names of your own")
    return found
