"""Options that commands share, and what they stand for: target, drafters, sampling."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from specjax import plugins, sampling, verify
from specjax.cli.errors import Refusal
from specjax.drafter import Drafter
from specjax.evaluate.comparison import DEFAULT_TARGET

DTYPES = ("float32", "bfloat16", "float16")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, drafter settings and sampling."""
    parser.add_argument(
        "--target", default=DEFAULT_TARGET, metavar="SOURCE",
        help="a known name, a path (GGUF file, checkpoint folder) or a Hugging Face id (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: float32 on CPU, else bfloat16)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings",
        help="a drafter's setting; `NAME.FIELD=VALUE` for one drafter only. May be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--rule", default="token", metavar="NAME",
        help=f"acceptance rule: {', '.join(verify.RULES)}, with settings as NAME:FIELD=VALUE, or ./file.py:Class "
        "(default: token)",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the smallest set of this mass (default: 1)")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep tokens of at least this share of the likeliest")
    parser.add_argument("--seed", type=seed, default=0, help="of all randomness (default: 0)")
    parser.add_argument("--system", help="system prompt")


def load_drafters(specs: Sequence[str], settings: Sequence[str]) -> dict[str, Drafter]:
    """Build drafters from their texts (`specjax.plugins`) and the `--set` options; each is named by its whole text.

    A `--set` without a drafter's name goes to every drafter that has the field, `none` aside; what stands
    behind a drafter's own name comes last.

    Raises:
      ValueError: an unknown drafter, field or value.
    """
    drafters: dict[str, Drafter] = {}
    parsed = [_parse_setting(text) for text in settings]
    used: set[int] = set()
    for spec in specs:
        name, _ = plugins.split(spec)
        known = _fields(name)
        values: dict[str, str] = {}
        for index, (owner, field, value) in enumerate(parsed):
            if owner == name or (owner is None and field in known):
                values[field] = value
                used.add(index)
        drafters[spec] = plugins.load_drafter(spec, values)
    for index, (owner, field, _) in enumerate(parsed):
        if index not in used:
            _refuse_setting(owner, field, [plugins.split(spec)[0] for spec in specs])
    return drafters


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if not text.lstrip("+").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer of at least 1")
    return int(text)


def not_negative(text: str) -> int:
    """An argparse type: an integer of at least 0."""
    if not text.lstrip("+").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer of at least 0")
    return int(text)


def seed(text: str) -> int:
    """An argparse type: a seed."""
    if not_negative(text) >= sampling.SEEDS:
        raise argparse.ArgumentTypeError(f"{text!r}: must be smaller than {sampling.SEEDS}")
    return int(text)


def _parse_setting(text: str) -> tuple[str | None, str, str]:
    left, equals, value = text.partition("=")
    owner, dot, field = left.rpartition(".")
    if not equals or not field:
        raise ValueError(f"setting {text!r}: write FIELD=VALUE or NAME.FIELD=VALUE, as in ngram.prompt_lookup_max=4")
    return (owner if dot else None), field, value


def _fields(name: str) -> set[str]:
    """What `--set` reaches without a drafter's name."""
    return set() if name == "none" else set(plugins.settings_of(name))


def _refuse_setting(owner: str | None, field: str, names: Sequence[str]) -> None:
    if owner is not None:
        raise Refusal(f"--set {owner}.{field}=...: {owner!r} is not among the drafters of this run: {', '.join(names)}")
    known = sorted(set().union(*map(_fields, names)))
    raise Refusal(f"--set {field}=...: no drafter of this run has this field; theirs are {', '.join(known)}")
