"""The card of a trained drafter: what it is, what it was trained for, and where it comes from.

`specjax.weights.trained` writes it beside the weights; opening it reads no weights.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.text import read_json
from specjax.types import Model
from specjax.weights.checkpoint import DamagedFile, sha256_of

CARD = "drafter.json"
FORMAT = 1
_SHIPPED = "specjax.drafters."


@dataclass(frozen=True)
class TargetIdentity:
    """Which target something was made for."""

    name: str
    sha256: str  # of its weights; empty: unknown, and only sizes are compared
    config: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, model: Model, sha256: str) -> TargetIdentity:
        """Of a model whose weights have this hash. How a backend pads its cache is no part of it."""
        known = dataclasses.asdict(model)  # type: ignore[call-overload]
        config = {key: value for key, value in known.get("config", known).items() if key != "cache_lanes"}
        return cls(name, sha256, json.loads(json.dumps(config)))


@dataclass(frozen=True)
class Card:
    """What `drafter.json` says."""

    folder: Path
    kind: str  # `early-exit`, or `eagle.py:Eagle` of a file beside the card
    fields: Mapping[str, Any]
    target: TargetIdentity
    files: Mapping[str, str]  # SHA-256 of each file of the weights, and of the source
    provenance: Mapping[str, Any]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The card and the files that it names."""
        return (self.folder / CARD, *(self.folder / name for name in self.files))

    def check_kind(self, kind: type) -> None:
        """Refuse a drafter of another class. The source may have changed since: the weights decide whether it fits.

        Raises:
          ValueError: with both classes.
        """
        wanted, source = name_of(kind)
        if self.kind != wanted and (source is None or self.kind.rpartition(":")[2] != kind.__qualname__):
            raise ValueError(
                f"{self.folder} holds a trained {self.kind}, not {wanted}: name the folder alone to open it"
            )

    def check_target(self, target: TargetIdentity) -> None:
        """Refuse another target than the drafter was trained for: hardly a draft of it would be accepted.

        Raises:
          ValueError: with the first difference.
        """
        trained = f"{self.folder} was trained for {self.target.name}"
        for name, value in self.target.config.items():
            if name in target.config and target.config[name] != value:
                raise ValueError(f"{trained} with {name}={value!r}; {target.name} has {target.config[name]!r}")
        if self.target.sha256 and self.target.sha256 != target.sha256:
            raise ValueError(
                f"{trained} with weights {self.target.sha256[:12]}; those of {target.name} are {target.sha256[:12]}: "
                f"give the target that it was trained for (or, if this is meant, delete target.sha256 in its {CARD})"
            )

    def check_files(self) -> None:
        """Hash the files.

        Raises:
          DamagedFile: one is missing or is not the one that was saved.
        """
        for name, sha256 in self.files.items():
            path = self.folder / name
            if not path.is_file():
                raise DamagedFile(f"{path} is missing: copy the folder again")
            if sha256_of(path) != sha256:
                raise DamagedFile(f"{path} is damaged or was changed (SHA-256 differs from {CARD}): copy it again")


def has_card(folder: str | Path) -> bool:
    """Whether a trained drafter stands there."""
    return (Path(folder).expanduser() / CARD).is_file()


def read_card(folder: str | Path) -> Card:
    """What a folder that `save_drafter` wrote holds; its weights are not read.

    Raises:
      ValueError: no card, or one of another format.
      DamagedFile: a card that lacks something.
    """
    folder = Path(folder).expanduser()
    path = folder / CARD
    if not path.is_file():
        raise ValueError(f"no trained drafter at {folder}: a folder with a {CARD} is one, as save_drafter writes it")
    card = read_json(path)
    if card.get("format") != FORMAT:
        raise ValueError(f"{path} has format {card.get('format')!r}: this specjax reads format {FORMAT}")
    try:
        target = TargetIdentity(**{"sha256": "", **card["target"]})
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in card["fields"].items()}
        return Card(folder, str(card["class"]), fields, target, dict(card["files"]), dict(card["provenance"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(f"{path} describes no drafter ({type(error).__name__}: {error}): save it again") from error


def name_of(kind: type) -> tuple[str, Path | None]:
    """What a card calls a class, and the file to copy where it is not one that comes with specjax."""
    if kind.__module__.startswith(_SHIPPED):
        return kind.__module__.removeprefix(_SHIPPED).replace("_", "-"), None
    try:
        source = Path(inspect.getfile(kind))
    except (TypeError, OSError):
        source = None
    if source is None or not source.is_file() or "<" in kind.__qualname__:
        raise ValueError(
            f"{kind.__qualname__} is not defined in a file, so that a folder of its weights could not be opened again: "
            "put the class into a file of its own and load it as ./file.py:Class"
        )
    return f"{source.name}:{kind.__qualname__}", source
