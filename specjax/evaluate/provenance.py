"""Where a run's tokens come from: versions, device, flags, code. A part of its manifest."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

SOURCES = ("specjax", "specjax.drafters")
PACKAGES = ("specjax", "jax", "jaxlib", "flax", "numpy", "tokenizers")


def describe() -> dict[str, Any]:
    """Everything about this process that may change a token, as plain data."""
    device = jax.devices()[0]
    return {
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "cpu_cores": os.cpu_count(),
        },
        "flags": {
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "jax_default_matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        },
        "code_sha256": code_sha256(),
        "git_revision": git_revision(),
    }


@functools.cache  # the code that a process runs is what it found when it began
def code_sha256() -> str:
    """Of the package's own Python files: what the git revision says of a checkout, for installed copies too."""
    digest = hashlib.sha256()
    for name in SOURCES:
        folder = Path(importlib.import_module(name).__path__[0])
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{name} {path.relative_to(folder)}".encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def git_revision(folder: Path = Path(__file__).parents[1]) -> str | None:
    """Commit of the checkout that this package is run from, `-dirty` if it was changed; `None` if installed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        tracked = git("ls-files", "--error-unmatch", "__init__.py")
        revision = git("rev-parse", "HEAD") if tracked else None
        changed = git("status", "--porcelain", "--untracked-files=no", ".", "../drafters")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{revision}-dirty" if changed else revision
