"""A checkpoint's chat template, rendered in a process of its own: it is a program, and comes from a file.

The process has a second of computing and half a GiB for a conversation; what asks for more is stopped there. It is
started once, with the first conversation, and ends with this one.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECONDS, BYTES = 1.0, 512 << 20
_lock = threading.Lock()


def render(template: str, values: Mapping[str, Any]) -> str:
    """The template's text for the values.

    Raises:
      ValueError: it refuses them, is no template, or costs too much.
    """
    with _lock:
        process = _process()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([template, dict(values)]), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        if not answer.endswith("\n"):  # it was ended in the middle
            process.kill()
            process.wait()
            _process.cache_clear()
            raise ValueError(f"it takes more than {SECONDS:g} s or {BYTES >> 20} MiB: repair the template")
    done, text = json.loads(answer)
    if not done:
        raise ValueError(text)
    return str(text)


@functools.cache
def _process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", Path(__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, encoding="utf-8", start_new_session=True,
    )  # fmt: skip


def _serve() -> None:
    """What the process does: a line of JSON in, a line of JSON out."""
    import resource
    import signal

    environment = _environment()
    with contextlib.suppress(ValueError, OSError):  # not every system bounds memory
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # nobody handles its signal: it ends the process
        try:
            template, values = json.loads(line)
            answer = [True, environment.from_string(template).render(**values)]
        except MemoryError:
            return
        except Exception as error:  # a template may raise anything
            answer = [False, str(error) or type(error).__name__]
        print(json.dumps(answer), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _environment() -> Any:
    """As transformers sets it up, but for the clock: a prompt that changes overnight could not be reproduced."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = datetime.date(2024, 7, 26).strftime  # Llama 3's own fallback date
    return environment


if __name__ == "__main__":
    _serve()
