"""Two thousand damaged inputs of every format: no traceback, no hang, no growth (see fuzz.py; more by hand)."""

import time

from fuzz import fuzz


def test_nothing_that_is_damaged_gives_a_traceback_hangs_or_grows():
    begin = time.perf_counter()
    found = fuzz(2000, seed=0)
    assert found.faults == []
    assert found.outcomes["accepted"] > 200
    assert found.outcomes["refused"] > 1000
    assert found.grown_bytes < 1 << 30
    assert time.perf_counter() - begin < 180


def test_a_fault_is_found(monkeypatch):
    """The fuzzer's own test: a reader that raises what no command expects."""
    monkeypatch.setattr("specjax.text.read_json", lambda path: {}["lost"])
    assert any("KeyError: 'lost'" in fault for fault in fuzz(40, seed=0).faults)
