"""What a run's records say of load: warnings that are due, none that are not, and what can't be seen is named."""

import dataclasses
import json

import numpy as np
import pytest
from fixtures_memory import preset  # noqa: F401
from scipy import stats

from specjax import cli, plugins, testing
from specjax.evaluate import under_load
from specjax.evaluate.record import Record
from specjax.evaluate.run_folder import read_run as read_run_folder
from specjax.memory import rates
from specjax.memory.acceptance import read_run
from specjax.testing import tiny_config
from specjax.types import Counts
from specjax.weights.checkpoint import sha256_of

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
    found = under_load.trends([*steady, falling])
    assert [trend.question_id for trend in found if trend.falling] == ["falling"]
    last = found[-1]
    assert last.first_half > last.second_half
    assert last.fall == pytest.approx(1 - last.second_half / last.first_half)


def test_false_alarms_stay_at_the_level_over_all_requests():
    rng = np.random.default_rng(1)
    runs = [[record(1 + rng.binomial(WINDOW, 0.5, 40)) for _ in range(10)] for _ in range(100)]
    alarms = sum(any(trend.falling for trend in under_load.trends(requests)) for requests in runs)
    assert alarms <= 5  # of 100 at level 0.01: more than 5 come with probability 5e-4


def test_rounds_that_the_end_shortened_and_short_requests_are_left_out():
    emitted = [3] * 10 + [1] * 10
    cut = record(emitted)
    counts = dataclasses.replace(cut.counts, cut=np.asarray([False] * 10 + [True] * 10))
    [trend] = under_load.trends([dataclasses.replace(cut, counts=counts), record([1] * 7)])
    assert (trend.rounds, trend.falling, trend.p_value) == (10, False, 1.0)


def test_the_effective_batch_is_what_still_decodes():
    together = [record([1] * n, f"q{n}", batch_rows=2, decode_s=0.5) for n in (10, 4)]
    assert under_load.effective_batch(together) == {"rows": 2.0, "effective": 1.4, "share": 0.7}
    assert under_load.effective_batch([record([1, 2])]) is None


def test_bursts_are_runs_of_rejecting_rounds_and_cost_a_round_a_token():
    found = under_load.bursts([record([5, 1, 1, 1, 5, 1])])
    assert found["longest"] == 3
    assert found["rejected_rounds"] == pytest.approx(4 / 6)
    assert found["p50_s"] == pytest.approx(0.01 / 5)
    assert found["spike"] == pytest.approx(5)
    assert under_load.bursts([record([1, 1], tested=False)]) is None
    assert under_load.runs(np.asarray([True, False, True, True])) == [1, 2]
    assert under_load.bursts([record([1, 5], decode_s=0.0)])["spike"] == 1


def test_clustering_is_the_test_of_wald_and_wolfowitz():
    flags = np.asarray([True] * 5 + [False] * 5)  # 2 runs; 6 expected, of variance 5 * 4 / 9
    assert under_load.clustering([flags]) == pytest.approx(stats.norm.cdf((2 - 6 + 1) / np.sqrt(20 / 9)))
    pooled = stats.norm.cdf((2 * (2 - 6) + 1) / np.sqrt(2 * 20 / 9))
    one_kind = np.ones(9, bool)
    assert under_load.clustering([flags, one_kind, flags, flags[:0]]) == pytest.approx(pooled)
    assert under_load.clustering([one_kind]) == 1


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.97])
def test_independent_acceptances_are_no_bursts(alpha):
    rng = np.random.default_rng(3)
    seen = 0
    for _ in range(200):
        request = record(1 + (rng.random((100, WINDOW)) < alpha).cumprod(1).sum(1))
        seen += under_load.fingerprints([request], {}, "")[1].seen
    assert seen <= stats.binom.isf(1e-3, 200, under_load.LEVEL)


def test_rejections_that_cluster_are_seen_with_their_p_value():
    rng = np.random.default_rng(4)
    rejects = np.repeat(rng.random(20) < 0.4, 5)  # as often as not, but five rounds at a time
    found = under_load.fingerprints([record(np.where(rejects, 1, 5))], {}, "")[1]
    assert found.seen is True
    assert "p = " in found.text
    mixed = under_load.fingerprints([record(np.where(rng.permutation(rejects), 1, 5))], {}, "")[1]
    assert mixed.seen is False


def test_a_round_that_drafted_nothing_is_no_rejection_and_parts_no_run():
    drafts = record([1, 1, 1, 1, 1, 1, 5, 5, 5, 5, 5, 5])
    tested = np.asarray([4, 0, 4, 4, 0, 4, 4, 4, 4, 4, 4, 4])
    found = under_load.bursts([dataclasses.replace(drafts, counts=dataclasses.replace(drafts.counts, tested=tested))])
    assert found["rejected_rounds"] == pytest.approx(4 / 10)
    assert found["p_value"] == under_load.clustering([np.arange(10) < 4])
    assert found["longest"] == 4


def test_what_the_records_cannot_show_is_named():
    prints = under_load.fingerprints([record([1, 1], tested=False)], {}, "nobody looked")
    assert [found.seen for found in prints] == [None] * 4
    assert all("not observable" in found.text for found in prints)
    assert prints[2].text == "not observable: nobody looked"
    row = {"offloaded_bytes": 10**9, "fetch_s": 0.5, "draft_s": 0.0, "verify_s": 0.0}
    assert under_load.fingerprints([record([1, 1])], row, "")[3].seen is None
    assert under_load.bursts([record([])]) is None


def test_each_fingerprint_is_seen_where_it_is():
    rounds = ([5] * 5 + [1] * 5, [5] * 15 + [1] * 5)
    rows = [record(emitted, batch_rows=2, decode_s=0.5) for emitted in rounds]
    row = {"offloaded_bytes": 10**9, "fetch_s": 0.5, "draft_s": 0.1, "verify_s": 0.1}
    rates = {"bytes_per_s": 8e11, "flop_per_s": 1.6e12, "ridge": 200.0, "share": 0.8}
    prints = under_load.fingerprints(rows, row, rates)
    assert [found.seen for found in prints] == [True, True, True, True]
    busy = under_load.fingerprints(rows, row | {"fetch_s": 0.01}, rates | {"flop_per_s": 8e14})
    assert [found.seen for found in busy[2:]] == [False, False]
    even = [record([5, 1] * n, batch_rows=2, decode_s=0.5) for n in (10, 8)]  # 18 of 20 slots decode, no run is long
    assert [found.seen for found in under_load.fingerprints(even, {}, "")[:2]] == [False, False]


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
    run = {"drafters": {"ngram": "", "x": ""}, "drafter_files": {}, "prompts": {"question_ids": ["q0", "q1", "q2"]}}
    (tmp_path / "manifest.json").write_text(json.dumps({"target": {"name": "small"}, **run}))
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


def refused(run_folder, capsys):
    """The one line with which the three commands that read a run refuse it."""
    sizes = ["--target", "tiny", "--drafter", "ngram", "--context", "256"]
    lines = set()
    for words in (["load", str(run_folder)], *([name, *sizes, "--acceptance", str(run_folder)]
                                               for name in ("memory", "plan"))):  # fmt: skip
        assert cli.main(words) == 2
        lines.add(capsys.readouterr().err)
    [line] = lines
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: 5, "5 is no record"),
        (lambda _: None, "None is no record"),
        (lambda line: line | {"counts": line["counts"] | {"emitted": [10**12]}}, "out of bounds"),
        (lambda line: line | {"counts": line["counts"] | {"emitted": [1, 2]}}, "counts of unequal length"),
        (lambda line: line | {"counts": line["counts"] | {"accepted": [-4] * 30}}, "negative counts"),
        (lambda line: line | {"counts": line["counts"] | {"emitted": [5] * 30}}, "counts of other tokens than it has"),
        (lambda line: line | {"counts": line["counts"] | {"drafted": [65] * 30}}, "counts of other tokens than it has"),
        (lambda line: line | {"counts": line["counts"] | {"drafted": [0] * 30}}, "more drafts tested than there were"),
        (lambda line: line | {"counts": line["counts"] | {"accepted": [0] * 30}}, "counts that no round has"),
        (lambda line: line | {"decode_s": "1"}, "decode_s is '1'"),
        (lambda line: line | {"decode_s": float("nan")}, "decode_s is nan"),
        (lambda line: line | {"session": ["s"]}, "session is ['s']"),
        (lambda line: line | {"category": "\x1b[2J"}, "control character in '\\x1b[2J'"),
    ],
)
def test_a_damaged_record_is_named_and_no_figure_made_of_it(change, message, run_folder, capsys):
    file = run_folder / "prompts.jsonl"
    first, second, last = file.read_text().splitlines(keepends=True)
    values = json.loads(second)
    del values["crc32"]  # a whole line, so that its values are looked at
    file.write_text(first + json.dumps(change(values)) + "\n" + last)
    line = refused(run_folder, capsys)
    assert f"{file}, line 2 is damaged ({message}" in line or ("out of" in message and message in line)
    assert "remove that line to redo it" in line


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "rows is no list"),
        ({"a": 1}, "rows is no list"),
        (["x"], "rows is no list"),
        ({"acceptance_length": "abc"}, "acceptance_length of ngram is 'abc'"),
        ({"acceptance_length": float("nan")}, "acceptance_length of ngram is nan"),
        ({"acceptance_length_interval": [1]}, "acceptance_length_interval of ngram is [1]"),
        ({"per_position": [1.7, -3]}, "per_position of ngram is [1.7, -3]"),
        ({"verify_s": float("inf")}, "verify_s of ngram is inf"),
        ({"label": "\x1b[2J"}, "control character in '\\x1b[2J'"),
    ],
)
def test_a_damaged_summary_is_named_and_no_figure_made_of_it(rows, message, run_folder, capsys):
    file = run_folder / "summary.json"
    summary = json.loads(file.read_text())
    wrong = isinstance(rows, dict) and "a" not in rows
    summary["rows"] = [summary["rows"][0] | rows] if wrong else rows
    file.write_text(json.dumps(summary))
    line = refused(run_folder, capsys)
    assert f"{file} is damaged ({message}" in line
    assert "remove that file and repeat the run's command" in line


def test_a_run_without_results_is_refused_and_half_a_line_is_not(run_folder, capsys):
    with (run_folder / "prompts.jsonl").open("a") as file:
        file.write('{"question')
    assert cli.main(["load", str(run_folder)]) == 0
    assert "none of 3 requests" in capsys.readouterr().out
    file = run_folder / "summary.json"
    summary = json.loads(file.read_text())
    for rows in ([], [row | {"acceptance_length": None} for row in summary["rows"]]):
        file.write_text(json.dumps(summary | {"rows": rows}))
        assert f"{run_folder} holds no finished results: repeat" in refused(run_folder, capsys)


TIMED = {"drafter": "ngram", "settings": "NGram(num_speculative_tokens=4)", "draft_s": 0.25, "verify_s": 0.75}


def manifest_of(**config):
    """Of a run of the small test model."""
    target = {"config": dataclasses.asdict(tiny_config()) | config, "dtype": "float32"}
    return {"target": target, "batch_size": 1, "device": {"platform": "cpu"}}


def test_rates_are_of_the_drafter_as_it_ran():
    once = rates.of_row(TIMED, manifest_of(), 64, None)
    assert once["flop_per_s"] > 0
    twice = rates.of_row(TIMED | {"draft_s": 1.0, "verify_s": 1.0}, manifest_of(), 64, None)
    assert twice["bytes_per_s"] == pytest.approx(once["bytes_per_s"] / 2)
    trees = [
        rates.of_row(TIMED | {"drafter": "mine.py:Tree", "settings": repr(tree)}, manifest_of(), 64, None, [tree])
        for tree in (testing.Tree(parents=(-1, 0)), testing.Tree(parents=(-1, 0, 1, 2, 3, 4)))
    ]
    assert trees[0]["flop_per_s"] < trees[1]["flop_per_s"]  # fields that are no text are read back, too


@pytest.mark.parametrize(
    ("row", "config", "reason"),
    [
        ({"draft_s": None}, {}, "the run did not time its rounds' halves"),
        ({"draft_s": 0.0, "verify_s": 0.0}, {}, "the run says that its rounds took 0 s"),
        ({"drafter": "./gone.py:Mine"}, {}, "it is code or weights of a file, which reading a run does not open"),
        ({"settings": "NGram(checkpoint='org/model')"}, {}, "it is code or weights of a file"),
        ({"settings": None}, {}, "its settings None are not of the form"),
        ({"settings": "NGram(7)"}, {}, "its settings NGram(7) are not of the form"),
        ({"settings": "Mine(fn=<function f at 0x7f>)"}, {}, "its settings Mine(fn=<function f at 0x7f>) are not"),
        ({}, {"unknown": 1}, "unexpected keyword argument 'unknown'"),
    ],
)
def test_rates_that_cannot_be_known_say_why(row, config, reason):
    assert reason in rates.of_row(TIMED | row, manifest_of(**config), 64, None)


def test_reading_a_run_runs_no_code_that_it_names_and_a_drafter_of_ones_own_must_be_the_runs(tmp_path):
    body = (
        "from pathlib import Path\nfrom dataclasses import dataclass\nfrom specjax import Draft, Drafter\n"
        "import jax.numpy as jnp\nPath(__file__).with_suffix('.ran').touch()\n"
        "@dataclass(frozen=True)\nclass Mine(Drafter):\n    num_speculative_tokens: int = 1\n"
        "    def propose(self, keys, params, state, target):\n"
        "        tokens = jnp.zeros((target.tokens.shape[0], 1), jnp.int32)\n"
        "        return Draft(tokens, None, target.cache, state)\n"
    )
    file = tmp_path / "mine.py"
    file.write_text(body)
    row = TIMED | {"drafter": f"{file}:Mine", "settings": "Mine(num_speculative_tokens=1)"}
    manifest = manifest_of() | {"drafter_files": {str(file): sha256_of(file)}}
    assert "which reading a run does not open: name it with --drafter" in rates.of_row(row, manifest, 64, None)
    assert not file.with_suffix(".ran").exists()
    mine = plugins.load_drafter(f"{file}:Mine")
    assert rates.of_row(row, manifest, 64, None, [mine])["flop_per_s"] > 0
    file.write_text(body + "\n")
    assert "is not the file that the run was made with" in rates.of_row(row, manifest, 64, None, [mine])


def test_every_single_bit_of_the_records_is_missed_when_it_flips(run_folder):
    file = run_folder / "prompts.jsonl"
    whole = file.read_bytes()
    expected = read_run_folder(run_folder)[2]
    rng = np.random.default_rng(0)
    for at in [*rng.integers(0, len(whole), 400), len(whole) - 1]:
        for bit in rng.integers(0, 8, 2):
            changed = bytearray(whole)
            changed[at] ^= 1 << int(bit)
            file.write_bytes(bytes(changed))
            if at == len(whole) - 1:  # the newest line is not closed: as after a kill, it is decoded again
                assert len(read_run_folder(run_folder)[2]) == len(expected) - 1
            else:
                with pytest.raises(ValueError, match=r"prompts\.jsonl, line"):
                    read_run_folder(run_folder)


def test_a_complete_run_is_not_believed_but_summed_up_again(tmp_path, monkeypatch, capsys):
    pass
