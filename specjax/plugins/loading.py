"""Drafters and rules by name, by file and from a folder: one grammar for every command, and for a notebook.

    ngram                                 a name of `available()`
    ./mine.py:Mine                        a class of a file (the class may be left out if there is one)
    ./trained                             a folder that training wrote (specjax.weights.save_drafter)

and behind any of them `:FIELD=VALUE,...`. A value of several parts goes on behind commas; what stands first
without a `=` is the drafter's checkpoint:

    ngram:prompt_lookup_max=2             fp8:kv=own,num_speculative_tokens=3
    ./mine.py:Mine:layers=2,5,8           external:llama-3.1-8b
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax import verify, weights
from specjax.drafter import Drafter, Nothing
from specjax.plugins import fields, files
from specjax.plugins.fields import Value

_PACKAGE = "specjax.drafters"


def load_drafter(spec: str, settings: Mapping[str, str] | None = None, /, **values: Value) -> Drafter:
    """Build a drafter.

    Args:
      spec: as this module says. What stands there goes before `settings`, and that before a folder's own fields.
      settings: fields as text.
      values: fields as values; they go before all others.

    Returns:
      the drafter, checked as far as it can be without a target. No weights were read.

    Raises:
      ValueError: an unknown drafter, class or field, with the valid ones; a value of the wrong type; a
        checkpoint that is none, or is another drafter's.
      RuntimeError: a file that raises, with its error.
    """
    name, own = split(spec)
    kind, saved = _find(name)
    given = fields.parse(kind, f"drafter {name!r}", {**(settings or {}), **own, **values})
    return kind(**{**saved, **given})


def settings_of(name: str) -> dict[str, Any]:
    """The fields of a drafter without settings of its own, and what they are where nothing else is said."""
    kind, saved = _find(name)
    return {field.name: saved.get(field.name, field.default) for field in dataclasses.fields(kind) if field.init}


def load_rule(spec: str) -> verify.Rule:
    """Build a rule: `token`, `lenient:lenience=0.95`, `./mine.py` or `./mine.py:Mine:FIELD=VALUE,...`.

    Raises:
      ValueError: an unknown rule, class or field, with the valid ones; a value of the wrong type.
      RuntimeError: a file that raises, with its error.
    """
    name, own = split(spec)
    if _is_file(name):
        kind = files.find_class(name, "rule", _is_rule)
    elif name in verify.RULES:
        kind = verify.RULES[name]
    else:
        raise ValueError(f"unknown rule {name!r}: choose from {', '.join(verify.RULES)}, or name ./file.py:Class")
    rule: verify.Rule = kind(**fields.parse(kind, f"rule {name!r}", own))
    return rule


def split(spec: str) -> tuple[str, dict[str, str]]:
    """`ngram:prompt_lookup_max=4` is the drafter `ngram` and its settings.

    Raises:
      ValueError: a setting without a value.
    """
    name, _, rest = spec.partition(":")
    if name.endswith(".py") and rest:
        kind, colon, behind = rest.partition(":")
        if kind.isidentifier():
            name, rest = f"{name}:{kind}", behind
        elif colon:
            raise ValueError(f"{spec!r}: {kind!r} is no name of a class; write ./file.py:Class:FIELD=VALUE,...")
    settings: dict[str, str] = {}
    last = ""
    for part in filter(None, rest.split(",")):
        field, equals, value = part.partition("=")
        if equals and field.isidentifier():
            settings[last := field] = value
        elif last:
            settings[last] += f",{part}"
        else:
            settings[last := "checkpoint"] = part
    return name, settings


def available() -> dict[str, str]:
    """Names of the drafters that come with specjax, and the first line of what each says of itself."""
    names = {"none": "plain decoding: drafts nothing"}
    return names | {name: _first_line(_class_of(module)) for name, module in _modules().items()}


def _find(name: str) -> tuple[type[Drafter], dict[str, Any]]:
    """The class that a name, a file or a folder stands for, and the fields that a folder was trained with."""
    if name == "none":
        return Nothing, {}
    if _is_file(name):
        return files.find_class(name, "drafter", _is_drafter), {}
    if name in (modules := _modules()):
        return _class_of(modules[name]), {}
    if not Path(name).expanduser().is_dir():
        raise ValueError(
            f"unknown drafter {name!r}: choose from {', '.join(available())}, or name ./file.py:Class "
            "or the folder of a trained one"
        )
    card = weights.read_card(name)
    kind = _class_of_card(card)
    return kind, fields.parse(kind, str(card.folder / weights.CARD), {**card.fields, "checkpoint": name})


def _modules() -> dict[str, str]:
    """Modules of drafters by the drafter's name; none of them is imported."""
    found = pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__)
    return {module.name.replace("_", "-"): f"{_PACKAGE}.{module.name}" for module in found}


def _class_of(module: str) -> type[Drafter]:
    return files.only_class(importlib.import_module(module), None, "drafter", _is_drafter)


def _class_of_card(card: weights.Card) -> type[Drafter]:
    if _is_file(card.kind):  # the source that was copied beside the weights
        return files.find_class(str(card.folder / card.kind), "drafter", _is_drafter)
    if card.kind not in _modules():
        raise ValueError(f"{card.folder} holds a trained {card.kind!r}, of which this specjax knows nothing")
    return _class_of(_modules()[card.kind])


def _is_file(name: str) -> bool:
    return name.partition(":")[0].endswith(".py")


def _is_drafter(kind: type) -> bool:
    return issubclass(kind, Drafter)


def _is_rule(kind: type) -> bool:
    return callable(getattr(kind, "verify", None)) or callable(getattr(kind, "accepts", None))


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]
