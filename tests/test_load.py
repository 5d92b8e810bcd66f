"""What a run's records say of load: warnings that are due, none that are not, and what can't be seen is named."""

import dataclasses
import json

import numpy as np
import pytest
from fixtures_memory import preset  # noqa: F401

from specjax import cli, load
from specjax.memory.acceptance import read_run
from specjax.records import Record
from specjax.types import Counts

WINDOW = 4


def record(emitted, question_id="q", *, tested=True, **changes):
    """One request's record from the tokens of its rounds."""
    emitted = np.asarray(emitted, np.int32)
    full = np.full_like(emitted, WINDOW if tested else 0)
    counts = Counts(full, full, emitted - 1, emitted, emitted.astype(np.float32), np.zeros(len(emitted), bool))
    values = {
        "question_id": question_id, "category": "chat", "drafter": "d", "prompt_tokens": 3, "capacity": 64,
        "batch_rows": 1, "session": "s", "finish": "length", "prefill_s": 0.1, "decode_s": 0.01 * len(emitted),
        "tokens": list(range(int(emitted.sum()) + 1)), "text": "", "counts": counts,
    }  # fmt: skip
    return Record(**(values | changes))


def test_an_acceptance_that_falls_is_warned_of_and_a_steady_one_is_not():
    rng = np.random.default_rng(0)
    steady = [record(1 + rng.binomial(WINDOW, 0.5, 60), f"steady-{i}") for i in range(20)]
    falling = record(1 + rng.binomial(WINDOW, np.linspace(0.9, 0.1, 60)), "falling")
    found = load.trends([*steady, falling])
    assert [trend.question_id for trend in found if trend.falling] == ["falling"]
    last = found[-1]
    assert last.first_half > last.second_half
    assert last.fall == pytest.approx(1 - last.second_half / last.first_half)


def test_false_alarms_stay_at_the_level_over_all_requests():
    rng = np.random.default_rng(1)
    runs = [[record(1 + rng.binomial(WINDOW, 0.5, 40)) for _ in range(10)] for _ in range(100)]
    alarms = sum(any(trend.falling for trend in load.trends(requests)) for requests in runs)
    assert alarms <= 5  # of 100 at level 0.01: more than 5 come with probability 5e-4


def test_rounds_that_the_end_shortened_and_short_requests_are_left_out():
    emitted = [3] * 10 + [1] * 10
    cut = record(emitted)
    counts = dataclasses.replace(cut.counts, cut=np.asarray([False] * 10 + [True] * 10))
    [trend] = load.trends([dataclasses.replace(cut, counts=counts), record([1] * 7)])
    assert (trend.rounds, trend.falling, trend.p_value) == (10, False, 1.0)


def test_the_effective_batch_is_what_still_decodes():
    together = [record([1] * n, f"q{n}", batch_rows=2, decode_s=0.5) for n in (10, 4)]
    assert load.effective_batch(together) == {"rows": 2.0, "effective": 1.4, "share": 0.7}
    assert load.effective_batch([record([1, 2])]) is None


def test_bursts_are_runs_of_rejecting_rounds_and_cost_a_round_a_token():
    found = load.bursts([record([5, 1, 1, 1, 5, 1])])
    assert found["longest"] == 3
    assert found["rejected_rounds"] == pytest.approx(4 / 6)
    assert found["p50_s"] == pytest.approx(0.01 / 5)
    assert found["spike"] == pytest.approx(5)
    assert load.bursts([record([1, 1], tested=False)]) is None
    assert load.runs(np.asarray([True, False, True, True])) == [1, 2]


def test_what_the_records_cannot_show_is_named():
    prints = load.fingerprints([record([1, 1], tested=False)], {}, None)
    assert [found.seen for found in prints] == [None] * 4
    assert all("not observable" in found.text for found in prints)


def test_each_fingerprint_is_seen_where_it_is():
    rounds = ([5, 5, 5, 1, 1], [5] * 10 + [1, 1])
    rows = [record(emitted, batch_rows=2, decode_s=0.5) for emitted in rounds]
    row = {"offloaded_bytes": 10**9, "fetch_s": 0.5, "draft_s": 0.1, "verify_s": 0.1}
    rates = {"bytes_per_s": 8e11, "flop_per_s": 1.6e12, "ridge": 200.0, "share": 0.8}
    prints = load.fingerprints(rows, row, rates)
    assert [found.seen for found in prints] == [True, True, True, True]
    busy = load.fingerprints(rows, row | {"fetch_s": 0.01}, rates | {"flop_per_s": 8e14})
    assert [found.seen for found in busy[2:]] == [False, False]


@pytest.fixture
def run_folder(tmp_path):
    """A run of two drafters, as `specjax compare` leaves it."""
    rng = np.random.default_rng(2)
    records = [record(1 + rng.binomial(WINDOW, 0.5, 30), f"q{i}", drafter="ngram") for i in range(3)]
    emitted = sum(int(r.counts.emitted.sum()) for r in records)
    row = {
        "drafter": "ngram", "settings": "NGram(num_speculative_tokens=4)", "acceptance_length": emitted / 90,
        "acceptance_length_interval": [2.5, 3.5], "rounds": 90, "per_position": [0.5], "draft_s": None,
        "verify_s": None,
    }  # fmt: skip
    rows = [row, row | {"drafter": "x", "acceptance_length": 2.0}]
    summary = {"complete": True, "title": "", "capacity": 64, "rows": rows}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "manifest.json").write_text(json.dumps({"target": {"name": "small"}}))
    (tmp_path / "prompts.jsonl").write_text("".join(record.line() for record in records))
    return tmp_path


def test_a_run_is_joined_with_its_raw_counts_where_it_has_them(run_folder):
    found = read_run(run_folder)
    assert found["ngram"].profile.expected_tokens(4) == pytest.approx(found["ngram"].acceptance_length)
    assert found["x"].profile.survival == (0.5,)
    assert "measured on small, 90 rounds" in found["x"].profile.source


def test_the_memory_command_joins_a_run_and_draws_it(run_folder, tmp_path, capsys):
    words = ["memory", "--target", "tiny", "--drafter", "ngram", "--context", "256", "--acceptance",
             str(run_folder)]  # fmt: skip
    assert cli.main([*words, "--plot", str(tmp_path / "pareto.png")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "acceptance, measured, against memory, from shapes" in out
    assert "measured as NGram(num_speculative_tokens=4) on small, not on tiny" in out
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main([*words, "--json"]) == 0
    [joined] = json.loads(capsys.readouterr().out)["acceptance"]
    gib = joined["added_bytes"] / 2**30
    assert joined["acceptance_length_per_added_gib"] == pytest.approx(joined["acceptance_length"] / gib)


def test_the_load_command_prints_what_it_sees_and_refuses_what_is_no_run(run_folder, tmp_path, capsys):
    assert cli.main(["load", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert "falling acceptance: none of 3 requests" in out
    assert "not observable: rows were decoded one at a time" in out
    assert cli.main(["load", str(tmp_path / "nowhere")]) == 2
    assert "has no summary.json" in capsys.readouterr().err
    (run_folder / "prompts.jsonl").write_text("{}\n")
    assert cli.main(["load", str(run_folder)]) == 2
    assert "line 1 is damaged" in capsys.readouterr().err
