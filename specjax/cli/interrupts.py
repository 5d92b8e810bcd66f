"""Ctrl-C ends a command within two seconds, wherever it is.

The exception that Python raises may get lost (what a garbage collection runs swallows it), do harm (an extension that
is being imported) or come late (a compiler does not look up). So it is not raised in the first two places, and a
thread hears of the signal at once: it asks again until the command takes note, and then ends it. What was kept on
disk stays whole: each record was complete before the next one began.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 130
LOOK_S, ASK_AGAIN_S, PATIENCE_S = 0.02, 0.8, 1.6
_noted, _put_off = threading.Event(), threading.Event()


def note() -> None:
    """The command knows, and comes to its end by itself."""
    _noted.set()


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Hear every Ctrl-C while a command runs, in the process's main thread."""
    _noted.clear()
    _put_off.clear()
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGINT, _raise)
    threading.Thread(target=_listen, args=(reader,), daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(before)
        writer.close()


def leave(code: int) -> None:
    """End the process without waiting for what the device still computes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _raise(number: int, frame: FrameType | None) -> None:
    """What Python does at Ctrl-C, but not amid an import or what a garbage collection runs."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_xla_gc_callback" or code.co_filename.startswith("<frozen importlib"):
            _put_off.set()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _listen(reader: socket.socket) -> None:
    while number := reader.recv(1):
        if number[0] != signal.SIGINT:
            continue
        begin = asked = time.monotonic()
        while not _noted.wait(LOOK_S):
            now = time.monotonic()
            if now - begin > PATIENCE_S:
                print("specjax: interrupted; what was finished is kept", file=sys.stderr)
                leave(EXIT_CODE)
            if _put_off.is_set() or now - asked > ASK_AGAIN_S:
                _put_off.clear()
                asked = now
                _thread.interrupt_main()
