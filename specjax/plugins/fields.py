"""Fields of a frozen dataclass from text, by the type of each one's default: `--set exit_layer=8`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Value = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""What a field of a drafter or a rule may hold, so that text, a card and a report can say it."""

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_NAMES = {"bool": bool, "int": int, "float": float, "str": str, "tuple": tuple}


def parse(kind: type, owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values for fields of `kind`, from text or as they are, each of its field's type.

    Args:
      owner: whose fields they are, for messages: `drafter 'ngram'`.

    Raises:
      ValueError: an unknown field, with the known ones; a value of another type, with an example.
    """
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    values = {}
    for name, value in given.items():
        if name not in fields:
            raise ValueError(f"{owner} has no field {name!r}: its fields are {', '.join(fields)}")
        wanted, items = _type_of(fields[name])
        try:
            values[name] = value if value is fields[name].default else _convert(value, wanted, items)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{name}={value!r}: expected {_example(fields[name], wanted, items)}") from error
    return values


def _type_of(field: dataclasses.Field[Any]) -> tuple[type, type]:
    """A field's type, and that of its items where it is a tuple: of its default, or else as it is declared."""
    if isinstance(field.default, tuple) and field.default:
        return tuple, type(field.default[0])
    declared = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    name, _, inner = declared.removesuffix("| None").strip().partition("[")
    item = _NAMES.get(inner.rstrip("]").partition(",")[0].strip(), int)
    known = isinstance(field.default, bool | int | float | str | tuple)
    return type(field.default) if known else _NAMES.get(name, object), item


def _convert(value: Any, wanted: type, item: type = int) -> Any:
    if wanted is object:
        if isinstance(value, str):
            raise ValueError("no text")
        return value
    if wanted is tuple:
        parts = [part.strip() for part in value.strip("()").split(",")] if isinstance(value, str) else value
        return tuple(_convert(part, item) for part in parts if part != "")
    if wanted is bool:
        return value if isinstance(value, bool) else _BOOLEANS[value.lower()]
    if wanted is str and not isinstance(value, str):
        raise ValueError("no text")
    if wanted is int and not isinstance(value, str) and (isinstance(value, bool) or int(value) != value):
        raise ValueError("no whole number")
    return wanted(value)


def _example(field: dataclasses.Field[Any], wanted: type, item: type) -> str:
    if wanted is object:
        return f"a value of type {field.type}, which can't be written as text: build the drafter in Python"
    kind = f"{item.__name__}s, as in {field.name}=2,5,8" if wanted is tuple else wanted.__name__
    plain = wanted is tuple or field.default is dataclasses.MISSING
    return kind if plain else f"{kind}, as in {field.name}={field.default}"
