"""What ends a command early with one line instead of a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Refusal(Exception):
    """The input is not acceptable; nothing was done. Exit code 2."""


class Failure(Exception):
    """Something went wrong in the middle; the message says what was kept. Exit code 1."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """While a command prepares, what its parts raise about the input is an answer to the user."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, OverflowError) as error:
        raise Refusal(" ".join(str(error).split()) or type(error).__name__) from error
