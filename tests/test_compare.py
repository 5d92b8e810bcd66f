"""`specjax compare` on a tiny target: the table, the run folder, and every way in which a run may end early."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures_cli import PROMPTS, question_file, tiny_checkpoint  # noqa: F401

from specjax import Nothing, cli, evaluate, plugins, testing, verify, weights
from specjax.cli import compare
from specjax.cli.errors import Failure
from specjax.drafter import Drafter
from specjax.engine import NotFiniteError
from specjax.evaluate import measure, rows, run_folder
from specjax.evaluate.comparison import Comparison
from specjax.evaluate.preparation import prepare
from specjax.evaluate.record import Record
from specjax.evaluate.result import Result
from specjax.evaluate.run_folder import RunFolder
from specjax.evaluate.store import StoreError
from specjax.types import Counts, Draft

NGRAM = "ngram:num_speculative_tokens=2"
BUDGET = 10


@pytest.fixture(scope="module")
def command(checkpoint, questions):
    """Run `specjax compare` on the tiny target; all runs share their compilations."""

    def run(out, *arguments):
        return cli.main(
            ["compare", "--target", str(checkpoint), "--prompts", str(questions), "--drafter", NGRAM,
             "--max-new-tokens", str(BUDGET), "--limit", "3", "--out", str(out), *arguments]
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def finished(command, tmp_path_factory):
    """The folder of a complete run."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert command(out) == 0
    return out


def lines(folder):
    return [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]


def tokens_by_key(folder):
    return {(line["drafter"], line["question_id"]): line["tokens"] for line in lines(folder)}


def test_the_summary_has_a_row_a_drafter_with_every_figure(finished):
    result = json.loads((finished / "summary.json").read_text())
    assert result["complete"]
    assert [row["drafter"] for row in result["rows"]] == ["none", NGRAM]
    for row in result["rows"]:
        assert row["greedy_equal"] is True
        assert row["exact"] is True
        assert 1 <= row["acceptance_length"] <= 3
        assert set(row["added_bytes"]) == {"weights", "kv", "state", "buffers"}
        assert row["peak_bytes"] > 0
        assert row["tokens_per_second"] > 0
        assert row["draft_s"] > 0
        assert row["verify_s"] > 0
    plain, ngram = result["rows"]
    assert plain["speedup"] == plain["estimated_speedup"] == plain["acceptance_length"] == 1.0
    assert plain["acceptance_rate"] is None
    assert set(plain["added_bytes"].values()) == {0}
    assert ngram["added_bytes"]["weights"] == ngram["added_bytes"]["kv"] == 0
    assert ngram["acceptance_rate"] == pytest.approx(ngram["accepted"] / ngram["drafted"])


def test_each_prompt_leaves_its_raw_counts(finished):
    found = lines(finished)
    assert {(line["drafter"], line["question_id"]) for line in found} == {
        (drafter, str(prompt["question_id"])) for drafter in ("none", NGRAM) for prompt in PROMPTS
    }
    for line in found:
        assert sum(line["counts"]["emitted"]) == len(line["tokens"]) - 1
        assert len(line["tokens"]) <= BUDGET
        assert set(line["counts"]) == {"drafted", "tested", "accepted", "emitted", "overlap", "cut"}


def test_offloaded_weights_are_measured_and_change_no_token(command, tmp_path):
    external = "external:num_speculative_tokens=2,keep_layers=1"
    assert command(tmp_path / "run", "--drafter", external, "--offload", "host", "--limit", "1") == 0
    none, _, offloaded = json.loads((tmp_path / "run" / "summary.json").read_text())["rows"]
    assert none["offloaded_bytes"] is none["fetch_s"] is None
    assert offloaded["offloaded_bytes"] == offloaded["added_bytes"]["weights"] > 0
    assert offloaded["fetch_s"] > 0
    assert offloaded["greedy_equal"] is True


def test_the_manifest_says_what_the_tokens_depend_on(finished):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["drafters"][NGRAM].startswith("NGram(num_speculative_tokens=2")
    assert len(manifest["target"]["sha256"]) == len(manifest["prompts"]["sha256"]) == 64
    assert manifest["prompts"]["question_ids"] == ["81", "82", "101"]
    assert {"jax", "specjax", "python"} <= set(manifest["versions"])
    assert {"command", "created", "seed", "sampling", "device", "flags", "git_revision"} <= set(manifest)


def test_the_manifest_holds_hashes_of_a_drafters_own_code_and_weights(checkpoint, questions, tmp_path):
    (tmp_path / "mine.py").write_text("from specjax import Nothing\nclass Mine(Nothing): ...\n")
    drafters = [f"{tmp_path}/mine.py:Mine", f"external:checkpoint={checkpoint}"]
    comparison = Comparison(str(checkpoint), drafters, prompts=str(questions), max_new_tokens=1)
    files = prepare(comparison).manifest()["drafter_files"]
    assert f"{tmp_path}/mine.py" in files
    assert f"{checkpoint}/model.json" in files
    assert all(len(digest) == 64 for digest in files.values())


def test_the_folder_has_a_picture(finished):
    assert (finished / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_round_has_no_rate_and_no_speed(command, tmp_path, capsys):
    """Every denominator is zero: one token a text, which is the prompt's own pass."""
    for _ in range(2):  # decoded, then read from its files
        assert command(tmp_path / "run", "--max-new-tokens", "1", "--limit", "1") == 0
        assert "1 of 3 prompts" in capsys.readouterr().out
        for row in json.loads((tmp_path / "run" / "summary.json").read_text())["rows"]:
            assert (row["rounds"], row["emitted"]) == (0, 0)
            unknown = ("acceptance_length", "acceptance_rate", "tokens_per_second", "estimated_speedup")
            assert [row[name] for name in unknown] == [None] * 4
    assert cli.main(["load", str(tmp_path / "run")]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_complete_run_is_shown_and_not_decoded_again(finished, command, monkeypatch, capsys):
    monkeypatch.setattr(measure, "decode_batch", None)
    before = (finished / "prompts.jsonl").read_bytes()
    assert command(finished) == 0
    shown = capsys.readouterr()
    assert "acceptance length, pooled" in shown.out
    assert "greedy output equals none's" in shown.out
    assert "is complete" in shown.err
    assert (finished / "prompts.jsonl").read_bytes() == before


def test_a_killed_run_continues_without_its_torn_line_and_redoes_nothing(finished, command, tmp_path, monkeypatch):
    kept = (finished / "prompts.jsonl").read_text().splitlines(keepends=True)
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "prompts.jsonl").write_text("".join(kept[:2]) + kept[2][:70])
    decoded = count_decodings(monkeypatch)
    assert command(tmp_path / "run") == 0
    assert len(decoded) == 4
    assert (tmp_path / "run" / "prompts.jsonl").read_text().startswith("".join(kept[:2]))
    assert tokens_by_key(tmp_path / "run") == tokens_by_key(finished)


MEASURED = ("compile_s", "compiler_bytes", "temp_bytes", "draft_s", "verify_s")


def test_a_run_that_was_killed_before_its_summary_measures_what_it_had_decoded(finished, command, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert command(tmp_path / "run") == 0
    before, after = (json.loads((folder / "summary.json").read_text()) for folder in (finished, tmp_path / "run"))
    for old, new in zip(before["rows"], after["rows"], strict=True):
        assert all(new[name] is not None for name in MEASURED)
        for name in ("compiler_bytes", "temp_bytes", "acceptance_length", "exact", "checked"):
            assert new[name] == old[name]


def test_ctrl_c_keeps_and_shows_what_is_done_and_the_run_continues(finished, command, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        count_decodings(patch, stop_at=4)
        assert command(tmp_path / "run") == 130
    shown = capsys.readouterr()
    assert "acceptance length, pooled" in shown.out
    assert "3 of 6 results are kept" in shown.err
    assert len(lines(tmp_path / "run")) == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["complete"] is False
    decoded = count_decodings(monkeypatch)
    assert command(tmp_path / "run") == 0
    assert len(decoded) == 3
    assert tokens_by_key(tmp_path / "run") == tokens_by_key(finished)


def test_another_runs_folder_is_refused_with_the_difference_and_left_alone(finished, command, capsys):
    before = (finished / "prompts.jsonl").read_bytes()
    assert command(finished, "--seed", "1") == 2
    assert "holds another run (seed was 0, is 1): it is not overwritten" in capsys.readouterr().err
    assert (finished / "prompts.jsonl").read_bytes() == before


def test_a_folder_at_which_another_process_is_at_work_is_left_alone(finished, command, tmp_path, capsys):
    manifest = json.loads((finished / "manifest.json").read_text())
    other = RunFolder.open(tmp_path / "run", manifest)
    (tmp_path / "run" / "prompts.jsonl").write_text('{"half a line')
    assert command(tmp_path / "run") == 2
    assert "another process is at work in" in capsys.readouterr().err
    assert (tmp_path / "run" / "prompts.jsonl").read_text() == '{"half a line'
    other.close()
    RunFolder.open(tmp_path / "run", manifest).close()


def test_names_are_no_markup_and_no_formulas(command, tmp_path, capsys):
    path = tmp_path / "a$b$" / "x_{$.jsonl"
    path.parent.mkdir()
    prompts = [{"question_id": "[/i]", "category": "[/b]", "turns": ["hi"]}, {"question_id": 2, "turns": ["ho"]}]
    path.write_text("\n".join(map(json.dumps, prompts)))
    assert command(tmp_path / "run", "--prompts", str(path), "--limit", "2") == 0
    assert "[/b]" in capsys.readouterr().out


def test_a_default_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(StoreError, match="can't be read .*: name one with --out"):
        run_folder.default_folder("2026-01-01", "compare", {}, tmp_path / "runs")


def test_a_picture_that_cannot_be_written_says_what_was_kept(command, tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compare.plots, "draw", full)
    assert command(tmp_path / "run", "--limit", "1") == 1
    shown = capsys.readouterr()
    assert "acceptance length, pooled" in shown.out
    assert "can't be written any more (No space left on device)" in shown.err


def test_a_folder_of_other_things_is_refused(command, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    assert command(tmp_path) == 2
    assert "is no run folder and holds 'thesis.tex'" in capsys.readouterr().err


def test_an_unwritable_folder_is_refused_before_weights_are_read(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(weights.Checkpoint, "load", None)
    (tmp_path / "file").write_text("")
    assert command(tmp_path / "file" / "run") == 2
    message = capsys.readouterr().err
    assert "can't be written (Not a directory): choose another with --out" in message
    assert message.count("\n") == 1


def test_too_little_space_is_refused_before_weights_are_read(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(weights.Checkpoint, "load", None)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    assert command(tmp_path / "run") == 2
    assert "less than 16 MiB are free" in capsys.readouterr().err


def test_a_disk_that_fills_up_midway_says_what_was_kept(command, tmp_path, monkeypatch, capsys):
    written = []

    def fsync(descriptor):
        written.append(descriptor)
        if len(written) == 4:  # the manifest, two records, and then
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.os, "fsync", fsync)
        assert command(tmp_path / "run") == 1
    message = capsys.readouterr().err
    assert "can't be written any more (No space left on device). What was decoded before is kept" in message
    assert len(lines(tmp_path / "run")) >= 2
    assert command(tmp_path / "run") == 0


def test_logits_that_are_not_finite_end_the_run_with_a_message_and_keep_the_rest(
    command, tmp_path, monkeypatch, capsys
):
    original = measure.decode_batch
    calls = []

    def poisoned(engine, batch, shared):
        calls.append(batch)
        if len(calls) == 3:
            engine.params = jax.tree.map(lambda leaf: leaf * jnp.nan, engine.params)
        return original(engine, batch, shared)

    monkeypatch.setattr(measure, "decode_batch", poisoned)
    assert command(tmp_path / "run") == 1
    shown = capsys.readouterr()
    assert "none, 82: target logits of row 0 are not finite at position" in shown.err
    assert "2 of 6 results are kept" in shown.err
    assert [line["finish"] for line in lines(tmp_path / "run")] == ["length", "length", "not_finite"]
    assert "acceptance length, pooled" in shown.out


def test_the_row_whose_logits_are_not_finite_is_named_not_the_last_of_its_batch():
    broken = dataclasses.replace(record("none", "a", [1]), finish="not_finite")
    records = (broken, record("none", "b", [1, 2]))
    result = Result(Comparison(), {"rows": [], "title": ""}, records, 2, Path("run"), NotFiniteError(0, 3, []))
    with pytest.raises(Failure, match="none, a: target logits of row 0 .* 1 of 2 results are kept in run"):
        compare._say_goodbye(result, Path("run"))


def test_a_sampled_run_claims_no_greedy_equality(command, tmp_path, capsys):
    assert command(tmp_path / "run", "--temperature", "0.8", "--limit", "1") == 0
    rows = json.loads((tmp_path / "run" / "summary.json").read_text())["rows"]
    assert [row["greedy_equal"] for row in rows] == [None, None]
    [line] = [line for line in capsys.readouterr().out.splitlines() if "greedy output" in line]
    assert line.split()[-2:] == ["n/a", "n/a"]


def test_prompts_decoded_together_get_the_same_tokens(finished, checkpoint, questions, tmp_path):
    arguments = ["compare", "--target", str(checkpoint), "--prompts", str(questions), "--drafter", "none"]
    arguments += ["--max-new-tokens", str(BUDGET), "--all", "--batch-size", "2", "--out", str(tmp_path / "run")]
    assert cli.main(arguments) == 0
    assert [line["batch_rows"] for line in lines(tmp_path / "run")] == [2, 2, 1]
    plain = {key: tokens for key, tokens in tokens_by_key(finished).items() if key[0] == "none"}
    assert tokens_by_key(tmp_path / "run") == plain


def test_a_default_folder_continues_its_run_and_never_takes_a_complete_or_other_one(tmp_path):
    nothing = {"drafters": {}, "drafter_files": {}, "prompts": {"question_ids": []}}
    manifest = {"seed": 1, "created": "now", **nothing}
    first = run_folder.default_folder("2026-01-01", "compare", manifest, tmp_path)
    assert first.name == "2026-01-01-compare"
    RunFolder.open(first, manifest)
    assert run_folder.default_folder("2026-01-01", "compare", manifest | {"created": "later"}, tmp_path) == first
    assert (
        run_folder.default_folder("2026-01-01", "compare", manifest | {"seed": 2}, tmp_path).name
        == "2026-01-01-compare-2"
    )
    run_folder.write_json(first / "summary.json", {"complete": True})
    assert run_folder.default_folder("2026-01-01", "compare", manifest, tmp_path).name == "2026-01-01-compare-2"


def test_a_damaged_line_in_the_middle_is_named(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / "prompts.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text(first[:50] + "\n" + "".join(rest))
    with pytest.raises(StoreError, match="line 1 is damaged"):
        RunFolder.open(tmp_path / "run", json.loads((finished / "manifest.json").read_text()))


def test_bytes_that_are_no_text_are_a_damaged_line(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / "prompts.jsonl"
    file.write_bytes(b"\xff\xfe\n" + file.read_bytes())
    with pytest.raises(StoreError, match="line 1 is damaged"):
        RunFolder.open(tmp_path / "run", json.loads((finished / "manifest.json").read_text()))


def test_a_record_comes_back_from_its_line(finished):
    for line in (finished / "prompts.jsonl").read_text().splitlines(keepends=True):
        assert Record.parse(line).line() == line


def test_a_text_with_rare_line_ends_is_one_record(tmp_path):
    manifest = {"drafters": {"none": {}}, "drafter_files": {}, "prompts": {"question_ids": ["q"]}}
    folder = RunFolder.open(tmp_path, manifest)
    written = dataclasses.replace(record("none", "q", [1, 2]), text="a\u2028b\x85c\x1cd\re\nf")
    folder.append(written)
    folder.close()
    [found] = RunFolder.open(tmp_path, manifest).store.rows
    assert found.text == written.text


def record(drafter, question_id, tokens, *, decode_s=1.0, session="s"):
    rounds = len(tokens) - 1
    ones = np.ones(rounds, np.int32)
    counts = Counts(0 * ones, 0 * ones, 0 * ones, ones, np.zeros(rounds, np.float32), np.zeros(rounds, bool))
    return Record(
        question_id=question_id, category="c", drafter=drafter, prompt_tokens=3, capacity=128, batch_rows=1,
        session=session, finish="length", prefill_s=0.1, decode_s=decode_s, tokens=tokens, text="", counts=counts,
    )  # fmt: skip


KNOWN = {
    "none": rows.Contender("Nothing()", "", exact=True, draft_s=0.0, verify_s=0.1),
    "x": rows.Contender("X()", "untrained", exact=True, draft_s=0.1, verify_s=0.1),
}


def test_a_speedup_compares_prompts_that_both_decoded_in_one_session():
    taken = [
        record("none", "a", [1] * 11, decode_s=2.0), record("x", "a", [1] * 11, decode_s=1.0),
        record("none", "b", [1] * 11, decode_s=1.0, session="t"), record("x", "b", [1] * 11, decode_s=9.0),
        record("x", "c", [1] * 11, decode_s=9.0),
    ]  # fmt: skip
    plain, other = rows.make_rows(KNOWN, taken, greedy=True)
    assert plain["speedup"] == 1.0
    assert other["speedup"] == 2.0
    assert other["tokens_per_second"] == pytest.approx(30 / 19)
    assert other["estimated_speedup"] == pytest.approx(0.5)


def test_a_drafter_that_does_not_pay_is_told_so_and_its_label_stands_by_it():
    taken = [record("none", "a", [1] * 5), record("x", "a", [1] * 5, decode_s=4.0)]
    _, row = rows.make_rows(KNOWN, taken, greedy=True)
    assert row["notes"][:2] == ["untrained", "does not pay here: 0.25 x the speed of none"]


def test_an_approximate_rule_is_told():
    known = {"none": KNOWN["none"], "x": rows.Contender("X()", "", exact=False)}
    _, row = rows.make_rows(known, [record("none", "a", [1, 2]), record("x", "a", [1, 2])], greedy=True)
    assert "approximate: the rule is not proven to keep the target's probabilities" in row["notes"]


def test_a_window_wider_than_the_smallest_size_gets_a_larger_one(checkpoint, questions, monkeypatch):
    monkeypatch.setattr("specjax.evaluate.preparation.SMALLEST_CAPACITY", 32)
    comparison = Comparison(str(checkpoint), [NGRAM], prompts=str(questions), max_new_tokens=1)
    wide = dataclasses.replace(comparison, drafters=["ngram:num_speculative_tokens=200"])
    assert prepare(wide).capacity("101") > 200
    assert prepare(comparison).capacity("101") == 128


def test_the_default_takes_one_prompt_of_each_kind_that_fits_the_smallest_size(checkpoint, questions, tmp_path):
    def chosen(file, **settings):
        return list(prepare(Comparison(str(checkpoint), prompts=str(file), **settings)).chosen)

    assert chosen(questions) == ["81", "101"]
    assert chosen(questions, categories=["math"]) == ["101"]
    assert chosen(questions, all=True) == ["81", "82", "101"]
    long = {"question_id": "long", "category": "math", "turns": ["x" * 200]}  # fits the context of 256 without 40 more
    longer = tmp_path / "longer.jsonl"
    longer.write_text(questions.read_text() + json.dumps(long))
    assert chosen(longer, max_new_tokens=40) == ["81", "101"]


@pytest.mark.parametrize(
    ("tokens", "position", "token"), [([1, 2, 9, 4], 2, 9), ([1, 2], 2, None), ([1, 2, 3, 4, 5], 4, 5)]
)
def test_a_greedy_difference_is_reported_where_it_begins(tokens, position, token):
    taken = [record("none", "a", [7, 7]), record("x", "a", [7, 7])]
    taken += [record("none", "b", [1, 2, 3, 4]), record("x", "b", tokens)]
    _, row = rows.make_rows(KNOWN, taken, greedy=True)
    assert row["greedy_equal"] is False
    difference = row["greedy_difference"]
    assert (difference["question_id"], difference["position"], difference["token"]) == ("b", position, token)
    assert any("first in b at token" in note for note in row["notes"])
    _, sampled = rows.make_rows(KNOWN, taken, greedy=False)
    assert sampled["greedy_equal"] is None


def test_the_margin_is_the_distance_of_the_two_largest_logits():
    model = testing.TableModel(4, order=1)
    laws = np.full((5, 4), 0.1)
    laws[:, 2], laws[:, 3] = 0.5, 0.3
    found = measure.margin(model, testing.table_params(laws), [0, 1, 2], jnp.float32)
    assert found == pytest.approx(np.log(0.5 / 0.3), abs=1e-6)


@pytest.fixture(scope="module")
def small(checkpoint, questions):
    """What the command of these tests does, as a value."""
    return Comparison(str(checkpoint), [NGRAM], prompts=str(questions), max_new_tokens=BUDGET, limit=3)


def test_a_comparison_gives_the_commands_records_without_a_command_line(small, finished, tmp_path):
    result = evaluate.compare(small, tmp_path / "run", progress=None)
    assert tokens_by_key(tmp_path / "run") == tokens_by_key(finished)
    counts = {(line["drafter"], line["question_id"]): line["counts"] for line in lines(finished)}
    assert {(r.drafter, r.question_id): json.loads(r.line())["counts"] for r in result.records} == counts
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path / "run", finished)]
    assert {**manifests[0], "command": manifests[1]["command"]} | {"created": ""} == manifests[1] | {"created": ""}
    rows = json.loads((finished / "summary.json").read_text())["rows"]
    assert [row["acceptance_length"] for row in result.rows] == [row["acceptance_length"] for row in rows]
    assert (result.total, result.done, result.stopped) == (6, 6, None)


def test_the_commands_folder_is_read_by_a_notebook_and_decoded_no_further(small, finished, monkeypatch):
    monkeypatch.setattr(measure, "decode_batch", None)
    result = evaluate.compare(small, finished)
    assert result.summary == json.loads((finished / "summary.json").read_text())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: {"complete": True}, "'rows' is missing"),
        (lambda s: s | {"rows": s["rows"][:1]}, "its rows are not the run's drafters"),
        (lambda s: s | {"title": ["x"]}, "title is no text"),
        (lambda s: s | {"rows": [s["rows"][0] | {"draft_s": "0.1"}, s["rows"][1]]}, "draft_s of none is '0.1'"),
        (lambda s: s | {"rows": [{k: v for k, v in row.items() if k != "exact"} for row in s["rows"]]}, "'exact' is"),
    ],
)
def test_a_complete_runs_summary_that_no_run_has_written_is_refused(small, finished, change, said):
    file = finished / "summary.json"
    whole = file.read_text()
    file.write_text(json.dumps(change(json.loads(whole))))
    try:
        with pytest.raises(StoreError, match=said):
            evaluate.compare(small, finished)
    finally:
        file.write_text(whole)


def test_the_figures_of_a_complete_run_are_those_of_its_records(small, finished):
    file = finished / "summary.json"
    whole = file.read_text()
    summary = json.loads(whole)
    file.write_text(json.dumps(summary | {"rows": [row | {"acceptance_length": 9.0} for row in summary["rows"]]}))
    try:
        assert evaluate.compare(small, finished).summary == summary
    finally:
        file.write_text(whole)


@dataclasses.dataclass(frozen=True)
class Failing(Drafter):
    """Fails when it is traced, for a batch of the real size only, or hands back a cache of another dtype."""

    num_speculative_tokens: int = 2
    raises: bool = True

    def propose(self, keys, params, state, target):
        if self.raises:
            raise KeyError("lost")
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.cache)
        return Draft(jnp.zeros((target.tokens.shape[0], 2), jnp.int32), None, narrow, state)


def test_a_drafter_that_fails_costs_the_others_nothing(small):
    drafters = {"raising": Failing(), "casting": Failing(raises=False), "fine": plugins.load_drafter("ngram")}
    result = evaluate.compare(dataclasses.replace(small, drafters=drafters, limit=1), progress=None)
    assert [row["drafter"] for row in result.rows] == ["none", "raising", "casting", "fine"]
    assert (result.failed, result.done, result.summary["complete"]) == (["raising", "casting"], 2, False)
    assert "raising: failed: RuntimeError: drafter Failing can't be traced: KeyError: 'lost'" in repr(result)
    assert "casting: failed: DraftError: Failing: its target's cache must keep its tree" in repr(result)
    assert result.rows[3]["acceptance_length"] >= 1


def test_a_folder_goes_on_without_the_drafter_that_failed(small, tmp_path, monkeypatch):
    both = dataclasses.replace(small, drafters={"raising": Failing(), "fine": plugins.load_drafter("ngram")}, limit=1)
    assert evaluate.compare(both, tmp_path / "run", progress=None).summary["complete"] is False
    decoded = count_decodings(monkeypatch)
    fine = tuple(pair for pair in both.drafters if pair[0] != "raising")
    result = evaluate.compare(dataclasses.replace(both, drafters=fine), tmp_path / "run", progress=None)
    assert (result.summary["complete"], decoded) == (True, [])
    assert list(json.loads((tmp_path / "run" / "manifest.json").read_text())["drafters"]) == ["none", "fine"]
    with pytest.raises(StoreError, match="holds another run"):  # of what has results, nothing is left out
        evaluate.compare(dataclasses.replace(both, drafters=()), tmp_path / "run", progress=None)


@dataclasses.dataclass(frozen=True)
class Untrue(Drafter):
    """Drafts as it should, but for one thing that no rule can make good."""

    num_speculative_tokens: int = 2
    fault: str = "sums"

    def propose(self, keys, params, state, target):
        rows, vocab = target.tokens.shape[0], target.model.vocab_size
        log_q = jnp.full((rows, 2, vocab), -jnp.log(vocab))
        if self.fault == "sums":
            log_q += 0.5
        if self.fault == "excluded":
            log_q = jnp.where(jnp.arange(vocab) == 3, -jnp.inf, jnp.full((rows, 2, vocab), -jnp.log(vocab - 1)))
        cache = target.cache
        if self.fault == "overwrites":
            cache = jax.tree.map(lambda leaf: leaf.at[:, :, 0].set(jnp.flip(leaf[:, :, 0], -1)), cache)
        return Draft(jnp.full((rows, 2), 3, jnp.int32), log_q, cache, state)


@pytest.mark.parametrize(
    ("fault", "note"),
    [
        ("", ""),
        ("sums", "the probabilities that it reports for draft 0 sum to 1.649"),
        ("excluded", "draft 0 is a token to which it reports probability 0"),
        ("overwrites", "its `propose` overwrites keys or values of committed tokens in the target's cache"),
    ],
)
def test_exact_is_said_of_what_was_checked(small, fault, note):
    drafters = {"x": Untrue(fault=fault)}
    result = evaluate.compare(dataclasses.replace(small, drafters=drafters, limit=1, temperature=1.0), progress=None)
    plain, row = result.rows
    assert (plain["exact"], plain["checked"], plain["fault"]) == (True, True, "")
    assert (row["exact"], row["checked"], row["fault"]) == (not note, True, note)
    [line] = [line for line in repr(result).splitlines() if "exact: rule proven" in line]
    assert line.split()[-2:] == ["yes", "no" if note else "yes"]
    assert (f"x: not exact: {note}" in " ".join(repr(result).split())) is bool(note)


def test_a_batch_of_more_rows_than_prompts_is_refused(small):
    with pytest.raises(ValueError, match="batch_size=100000: there are 1 prompts to decode together"):
        evaluate.compare(dataclasses.replace(small, limit=1, batch_size=100_000))


def test_a_result_in_memory_prints_as_the_table(small, capsys):
    result = evaluate.compare(dataclasses.replace(small, limit=1))
    assert result.folder is None
    for shown in (repr(result), result._repr_html_()):
        assert all(text in shown for text in (NGRAM, "acceptance length, pooled", "1 of 3 prompts"))
    assert "ngram:num_speculative_tokens=2: compiling for 256 slots" in capsys.readouterr().err


def test_an_interrupted_comparison_keeps_what_is_done_and_says_so(small, monkeypatch):
    count_decodings(monkeypatch, stop_at=4)
    result = evaluate.compare(small, progress=None)
    assert isinstance(result.stopped, KeyboardInterrupt)
    assert (result.done, len(result.records)) == (3, 3)
    assert "stopped after 3 of 6 results: KeyboardInterrupt" in repr(result)


def test_a_comparison_is_equal_by_value_however_its_drafters_were_given():
    text, made = (
        Comparison(drafters=["ngram:prompt_lookup_max=2"]),
        plugins.load_drafter("ngram", {"prompt_lookup_max": "2"}),
    )
    for drafters in ([made], {"ngram:prompt_lookup_max=2": made}, ["none", made], text.drafters):
        same = Comparison(drafters=drafters)
        assert same == text
        assert hash(same) == hash(text)
        assert repr(same) == repr(text)
    assert dataclasses.replace(text, seed=1) != text
    assert list(Comparison(drafters={"mine": made}).strategies) == ["none", "mine"]
    assert Comparison(rule="match") == Comparison(rule=verify.Match())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 0}, "limit=0: must be at least 1"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"limit": 1, "all": True}, "limit=1 and all=True: give one of them"),
        ({"rule": "hopeful"}, "unknown rule 'hopeful': must be one of token"),
        ({"drafters": ["eagle9"]}, "unknown drafter 'eagle9'"),
        ({"drafters": [("a", Nothing()), "ngram", ("ngram", Nothing())]}, "two drafters are named 'ngram'"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused_when_it_is_made(settings, message):
    with pytest.raises(ValueError, match=message):
        Comparison(**settings)


def test_texts_are_prompts_and_all_of_them_are_chosen(checkpoint):
    task = prepare(Comparison(str(checkpoint), prompts=["The sea.", "What is 2 + 2?"], max_new_tokens=8))
    assert [prompt.text for prompt in task.chosen.values()] == ["The sea.", "What is 2 + 2?"]


def count_decodings(monkeypatch, stop_at=None):
    """Note every decoded batch; raise as Ctrl-C does at the given one."""
    original, decoded = measure.decode_batch, []

    def decode_batch(engine, batch, shared):
        decoded.append(batch)
        if len(decoded) == stop_at:
            raise KeyboardInterrupt
        return original(engine, batch, shared)

    monkeypatch.setattr(measure, "decode_batch", decode_batch)
    return decoded
