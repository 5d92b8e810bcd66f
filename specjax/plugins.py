"""Rules by name, or from a file of one's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from specjax import verify
from specjax.drafter import _BOOLEANS, _import_file


def load_rule(spec: str) -> verify.Rule:
    """A rule by name (`block`) or from a file (`./mine.py:Mine`), and its fields (`lenient:lenience=0.95`).

    A file that defines one rule needs no class name.

    Raises:
      ValueError: an unknown name, class or field, with the valid ones; a value of the wrong type.
    """
    name, *rest = spec.split(":")
    given = dict(pair.split("=", 1) for pair in rest.pop().split(",")) if rest and "=" in rest[-1] else {}
    if name in verify.RULES and not rest:
        kind: Any = verify.RULES[name]
    elif name.endswith(".py") and len(rest) <= 1:
        kind = _only_rule(name, *rest)
    else:
        raise ValueError(f"unknown rule {spec!r}: choose from {', '.join(verify.RULES)}, or name ./file.py:Class")
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    for field in given:
        if field not in fields:
            raise ValueError(f"rule {name!r} has no field {field!r}: its fields are {', '.join(fields)}")
    rule: verify.Rule = kind(**{field: _like(fields[field], text) for field, text in given.items()})
    return rule


def _like(default: Any, text: str) -> Any:
    return _BOOLEANS[text] if isinstance(default, bool) else type(default)(text)


def _only_rule(path: str, name: str = "") -> Any:
    module = _import_file(Path(path))
    kinds = {
        key: kind
        for key, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and hasattr(kind, "verify")
    }
    if (name and name not in kinds) or (not name and len(kinds) != 1):
        raise ValueError(f"{path} defines {len(kinds)} rules ({', '.join(kinds)}): name one, as file.py:Class")
    return kinds[name] if name else next(iter(kinds.values()))
