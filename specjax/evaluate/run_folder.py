"""A run's folder: what was run, and one line a decoded prompt, safe on disk before the next one begins.

    manifest.json    everything that decides the tokens; a folder is continued only by the same manifest, or by one
                     that lacks drafters of which nothing was kept
    prompts.jsonl    one `Record` a line: raw counts, tokens, times
    summary.json     written at the end (and after Ctrl-C), from the records alone
    compare.png

Records are rows of a `Store`; the folder adds what they belong to, and that one process at a time works there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specjax.evaluate.record import Record, check_rows
from specjax.evaluate.store import Store, StoreError

SPARE_BYTES = 16 << 20  # asked for before a run begins: a record takes about 2 kB
LOCK = "run.lock"
INCIDENTAL = ("command", "created", "git_revision")
"""Manifest entries that don't decide a token."""


def record_store(path: Path | None = None, lock: FileLock | None = None) -> Store[Record]:
    """Records by drafter and prompt: those of a file, or none yet, kept in memory."""
    return Store(
        path, lambda record: (record.drafter, record.question_id), parse=Record.parse, line=Record.line, lock=lock
    )


def _records(path: Path, manifest: Mapping[str, Any], lock: FileLock | None = None) -> Store[Record]:
    """A folder's records, all of them of the run that its manifest describes."""
    store = record_store(path / "prompts.jsonl", lock)
    for number, record in enumerate(store.rows, 1):
        for value, known in ((record.drafter, manifest["drafters"]), (record.question_id, _question_ids(manifest))):
            if value not in known:
                where = f"{path / 'prompts.jsonl'}, line {number}"
                raise StoreError(f"{where} is of {value!r:.60}, which is no part of this run: remove that line")
    return store


@dataclass(frozen=True)
class RunFolder:
    """An open folder, with its records. `summary` is that of a run that is complete."""

    path: Path
    store: Store[Record]
    summary: dict[str, Any] | None = None

    @classmethod
    def open(cls, path: Path, manifest: Mapping[str, Any]) -> RunFolder:
        """Begin a run in a new or empty folder, or continue the same one; `close` it in the end.

        Raises:
          StoreError: another run's folder, one that is at work, an unwritable one, a full disk, a damaged record.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            return cls._open(path, manifest)
        except OSError as error:
            raise StoreError(
                f"run folder {path} can't be written ({error.strerror or error}): choose another with --out"
            ) from error

    @classmethod
    def _open(cls, path: Path, manifest: Mapping[str, Any]) -> RunFolder:
        found = _read_manifest(path)
        if found is None:
            _check_empty(path)
        else:
            _check_same(path, _without_failed(path, found, manifest), manifest)
        summary = _read_json(path / "summary.json") or {}
        if found is not None and summary.get("complete") is True:
            return cls(path, _records(path, manifest), summary)
        lock = _lock(path, found)  # held while the folder is open
        try:
            if shutil.disk_usage(path).free < SPARE_BYTES:
                raise StoreError(f"less than {SPARE_BYTES >> 20} MiB are free in {path}: free some, or use --out")
            if found is None or found["drafters"] != json.loads(json.dumps(manifest))["drafters"]:
                write_json(path / "manifest.json", manifest)
            return cls(path, _records(path, manifest, lock))
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Let another process continue the run."""
        self.store.lock.release()

    def append(self, record: Record) -> None:
        """Add a record, on disk when this returns.

        Raises:
          StoreError: it can't be written; earlier records are kept.
        """
        try:
            self.store.append(record)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, whole or not at all."""
        try:
            write_json(self.path / "summary.json", summary)
        except OSError as error:
            raise unwritable(self.path, error) from error


def unwritable(folder: Path, error: OSError) -> StoreError:
    """What to tell when a write fails in the middle of a run."""
    return StoreError(
        f"{folder} can't be written any more ({error.strerror or error}). What was decoded before is kept "
        "there: free some space and run the same command again with this --out to go on"
    )


def default_folder(date: str, command: str, manifest: Mapping[str, Any], root: Path = Path("runs")) -> Path:
    """`runs/<date>-<command>`, with a number behind it if that is another run, or a complete one."""
    try:
        return _free_folder(date, command, manifest, root)
    except OSError as error:
        raise StoreError(
            f"run folders in {root} can't be read ({error.strerror or error}): name one with --out"
        ) from error


def _free_folder(date: str, command: str, manifest: Mapping[str, Any], root: Path) -> Path:
    for number in range(1, 1000):
        path = root / (f"{date}-{command}" + (f"-{number}" if number > 1 else ""))
        found = _read_manifest(path)
        summary = _read_json(path / "summary.json") or {}
        if found is None and not (path.exists() and any(path.iterdir())):
            return path
        if found is None or summary.get("complete"):
            continue
        if not _differences(_without_failed(path, found, manifest), manifest):
            return path
    raise StoreError(f"{root} has a thousand runs of {date}: name a folder with --out")


def read_run(path: Path) -> tuple[dict[str, Any], dict[str, Any], tuple[Record, ...]]:
    """Summary, manifest and records of a run that ended.

    Raises:
      ValueError: no such folder, or a damaged one.
    """
    try:
        summary, manifest = _read_json(path / "summary.json"), _read_manifest(path)
        if summary is None or manifest is None:
            missing = "summary.json" if summary is None else "manifest.json"
            raise ValueError(f"{path} has no {missing}: give the folder of a run of `specjax compare` that ended")
        try:
            check_rows(summary.get("rows"))
        except ValueError as error:
            remedy = "remove that file and repeat the run's command with --out to have it written again"
            raise ValueError(f"{path / 'summary.json'} is damaged ({error}): {remedy}") from error
        if all(row.get("acceptance_length") is None for row in summary["rows"]):
            raise ValueError(f"{path} holds no finished results: repeat that run's command with --out {path} to go on")
        return summary, manifest, tuple(_records(path, manifest).rows)
    except StoreError as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        raise ValueError(
            f"{error.filename or path} can't be read ({error.strerror or error}): "
            "give the folder of a run of `specjax compare`"
        ) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file by one that is complete on disk."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}): remove it, or use another folder with --out") from error
    return value if isinstance(value, dict) else None


def _read_manifest(path: Path) -> dict[str, Any] | None:
    manifest = _read_json(path / "manifest.json")
    if manifest is not None:
        maps = [manifest.get(name) for name in ("drafters", "drafter_files", "prompts")]
        if not all(isinstance(part, dict) for part in maps) or not isinstance(_question_ids(manifest), list):
            raise StoreError(f"{path / 'manifest.json'} describes no run: use another folder with --out")
    return manifest


def _question_ids(manifest: Mapping[str, Any]) -> list[str]:
    ids: list[str] = manifest["prompts"].get("question_ids")
    return ids


def _lock(path: Path, found: Mapping[str, Any] | None) -> FileLock:
    """Two processes would time each other, and one would cut the line that the other is writing."""
    lock = FileLock(path / LOCK)
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=0)
    if not lock.is_locked or _read_json(path / "manifest.json") != found:  # the other may have begun just now
        lock.release()
        raise StoreError(f"another process is at work in {path}: wait for its end, or choose a folder with --out")
    return lock


def _check_empty(path: Path) -> None:
    left = [entry.name for entry in path.iterdir() if entry.name != LOCK and not entry.name.endswith(".part")]
    if left:
        raise StoreError(f"{path} is no run folder and holds {left[0]!r}: choose a new or empty one with --out")


def _without_failed(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest less the drafters of which nothing is kept and nothing is wanted: a run goes on without them."""
    gone = [name for name in found["drafters"] if name not in wanted["drafters"]]
    if not gone or {record.drafter for record in record_store(path / "prompts.jsonl").rows}.intersection(gone):
        return dict(found)
    kept = {
        name: {key: value for key, value in found[name].items() if key in wanted[name]}
        for name in ("drafters", "drafter_files")
    }
    return {**found, **kept}


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    wanted = json.loads(json.dumps(wanted))
    names = [name for name in {**found, **wanted} if name not in INCIDENTAL]
    return [
        f"{name} was {json.dumps(found.get(name))[:120]}, is {json.dumps(wanted.get(name))[:120]}"
        for name in names
        if found.get(name) != wanted.get(name)
    ]


def _check_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differences = _differences(found, wanted)
    if differences:
        raise StoreError(
            f"{path} holds another run ({'; '.join(differences[:3])}): it is not overwritten; "
            "choose another folder with --out, or repeat that run's command to continue it"
        )
