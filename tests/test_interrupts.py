"""Ctrl-C ends a command within two seconds, wherever it is."""

import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import hashlib, sys, time, types
from specjax import cli

def run(arguments):
    print("ready", flush=True)
    {body}
    return 0

sys.modules["slow"] = types.SimpleNamespace(run=run, add_arguments=lambda parser: None)
cli.COMMANDS["slow"] = ("slow", "takes its time")
sys.argv = ["specjax", "slow"]
sys.exit(cli.main())
"""
LOST = """
    for _ in range(2):  # as if a garbage collection swallowed it
        try:
            time.sleep(20)
            break
        except KeyboardInterrupt:
            pass
"""
COLLECTING = """
    def _xla_gc_callback():  # the name of JAX's, whose exceptions are printed and dropped
        time.sleep(0.7)
    try:
        _xla_gc_callback()
    except KeyboardInterrupt:
        sys.exit("raised where it is lost")
    time.sleep(20)
"""
IMPORTING = """
    import importlib, pathlib, tempfile
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "extension.py").write_text("import time\\ntry: time.sleep(0.7)\\nexcept BaseException: exit('amid')")
    sys.path.insert(0, str(folder))
    importlib.import_module("extension")
    time.sleep(20)
"""


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ("time.sleep(20)", 2.5),
        (LOST.strip(), 2.5),
        (COLLECTING.strip(), 2.5),
        (IMPORTING.strip(), 2.5),
        ("hashlib.pbkdf2_hmac('sha256', b'x', b'y', 2**30)", 2.5),  # in C, which does not look up
    ],
    ids=["asleep", "lost", "collecting", "importing", "in C"],
)
def test_an_interrupt_is_heard(body, seconds):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body=body)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
    assert time.monotonic() - begin < seconds
    assert process.returncode == 130
    assert errors.startswith("specjax: interrupted")
    assert errors.count("\n") == 1
