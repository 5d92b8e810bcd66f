"""One progress bar for long work: on a terminal a bar on stderr, elsewhere a single line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(title: str, total_bytes: int, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Give a function that takes the bytes done since its last call.

    Output goes to stderr, so that what a command prints can be piped.
    """
    if not show:
        yield lambda done: None
        return
    if not sys.stderr.isatty():
        print(f"{title} ({total_bytes / 1e6:.0f} MB)", file=sys.stderr, flush=True)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda done: bar.advance(task, done)
