"""Rules by name, or from a file of one's own."""

from __future__ import annotations

from pathlib import Path

from specjax import verify
from specjax.drafter import _import_file, _parse_fields


def load_rule(spec: str) -> verify.Rule:
    """A rule by name (`block`) or from a file (`./mine.py:Mine`), and its fields (`lenient:lenience=0.95`).

    A file that defines one rule needs no class name.

    Raises:
      ValueError: an unknown name, class or field, with the valid ones; a value of the wrong type.
    """
    name, *rest = spec.split(":")
    fields = dict(pair.split("=", 1) for pair in rest.pop().split(",")) if rest and "=" in rest[-1] else {}
    if name in verify.RULES and not rest:
        kind: type = verify.RULES[name]
    elif name.endswith(".py") and Path(name).is_file() and len(rest) <= 1:
        kind = _only_rule(name, *rest)
    else:
        raise ValueError(f"rule {spec!r}: must be one of {', '.join(verify.RULES)}, or ./file.py:Class")
    return kind(**_parse_fields(kind, spec, fields))


def _only_rule(path: str, name: str = "") -> type:
    module = _import_file(Path(path))
    kinds = {
        key: kind
        for key, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and hasattr(kind, "verify")
    }
    if (name and name not in kinds) or (not name and len(kinds) != 1):
        raise ValueError(f"{path} has {', '.join(kinds) or 'no rules'}: name one of them, as {path}:Class")
    return kinds[name] if name else next(iter(kinds.values()))
