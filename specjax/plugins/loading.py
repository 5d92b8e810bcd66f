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
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from specjax import verify, weights
from specjax.drafter import Drafter, Nothing
from specjax.plugins import fields
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
    made: Drafter = _make(kind, {**saved, **given})
    return made


def settings_of(name: str) -> dict[str, Any]:
    """The fields of a drafter without settings of its own, and what they are where nothing else is said."""
    kind, saved = _find(name)
    return {field.name: saved.get(field.name, field.default) for field in dataclasses.fields(kind) if field.init}


def load_rule(spec: str) -> verify.Rule:
    """Build a rule: `block`, `lenient:lenience=0.95`, `./mine.py` or `./mine.py:Mine:FIELD=VALUE,...`.

    Raises: as `load_drafter`.
    """
    name, own = split(spec)
    if _is_file(name):
        kind = _class_of_file(name, verify.Rule)
    elif name in verify.RULES:
        kind = verify.RULES[name]
    else:
        raise ValueError(f"unknown rule {name!r}: must be one of {', '.join(verify.RULES)}, or ./file.py:Class")
    rule: verify.Rule = _make(kind, fields.parse(kind, f"rule {name!r}", own))
    return rule


def _make(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A value of somebody's class, which can be told from others and be compiled for.

    Raises:
      ValueError: it can't be hashed, or lacks its method; whatever its constructor refuses.
      RuntimeError: whatever else its constructor raises.
    """
    base, method = (Drafter, "propose") if issubclass(kind, Drafter) else (verify.Rule, "verify")
    if getattr(kind, method, None) in (None, getattr(base, method)):
        raise ValueError(f"{kind.__name__} has no `{method}` of its own: write one")
    try:
        made = kind(**values)
        hash(made)
    except ValueError:
        raise
    except Exception as error:
        advice = "; make it a frozen dataclass whose fields have defaults" if isinstance(error, TypeError) else ""
        raise RuntimeError(f"{kind.__name__} can't be made: {type(error).__name__}: {error}{advice}") from error
    return made


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
    return names | {name: (_shipped(name).__doc__ or "").strip().partition("\n")[0] for name in _modules()}


def _find(name: str) -> tuple[type[Drafter], dict[str, Any]]:
    """The class that a name, a file or a folder stands for, and the fields that a folder was trained with."""
    if name == "none":
        return Nothing, {}
    if _is_file(name):
        return _class_of_file(name, Drafter), {}
    if name in _modules():
        return _shipped(name), {}
    if not Path(name).expanduser().is_dir():
        raise ValueError(
            f"unknown drafter {name!r}: choose from {', '.join(available())}, or name ./file.py:Class "
            "or the folder of a trained one"
        )
    card = weights.read_card(name)
    if not _is_file(card.kind) and card.kind not in _modules():
        raise ValueError(f"{card.folder} holds a trained {card.kind!r}, of which this specjax knows nothing")
    kind, _ = _find(str(card.folder / card.kind) if _is_file(card.kind) else card.kind)
    return kind, fields.parse(kind, str(card.folder / weights.CARD), {**card.fields, "checkpoint": name})


def _modules() -> list[str]:
    """Names of the drafters that come with specjax; none is imported."""
    found = pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__)
    return [module.name.replace("_", "-") for module in found]


def _shipped(name: str) -> type[Drafter]:
    return _only_class(importlib.import_module(f"{_PACKAGE}.{name.replace('-', '_')}"), "", Drafter)


def _is_file(name: str) -> bool:
    return name.partition(":")[0].endswith(".py")


def _class_of_file(spec: str, base: type) -> type[Any]:
    """The class that `./file.py:Class` names, or the only one of `./file.py`."""
    path, _, name = spec.partition(":")
    return _only_class(_run(Path(path).expanduser(), base.__name__.lower()), name, base)


def _only_class(module: ModuleType, name: str, base: type) -> type[Any]:
    """The named one of the drafters (or rules) that a module defines, or the only one."""
    role = base.__name__.lower()
    kinds = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, base)
    }
    if name and name not in kinds:
        raise ValueError(f"no {role} class {name!r} in {module.__file__}: it defines {', '.join(kinds) or 'none'}")
    if not name and len(kinds) != 1:
        found = ", ".join(kinds) or "none"
        raise ValueError(f"{module.__file__} defines {len(kinds)} {role}s ({found}): name one, as file.py:Class")
    return kinds[name or next(iter(kinds))]


def _run(path: Path, role: str) -> ModuleType:
    """A researcher's own file as a module: it is run once for each of its contents."""
    if not path.is_file():
        raise ValueError(f"no {role} file {path}: give the path of a Python file, as ./file.py:Class")
    digest = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"specjax_user_{path.stem}_{digest}"
    if name in sys.modules:  # a class defined again would be unequal to the first, and compile everything again
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file: give one, as ./file.py:Class")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RuntimeError(f"{role} file {path} raised {type(error).__name__}: {error}") from error
    return module
