"""One way to go on after a kill, for a comparison's records, the calibration's jobs and the table of memory."""

import json
import multiprocessing

import pytest
from specjax.experiments import calibration, memory_table

from specjax.evaluate.run_folder import RunFolder
from specjax.evaluate.store import Store, StoreError


def by_name(path):
    return Store(path, lambda row: row["name"])


def test_what_is_done_is_not_done_again_and_half_a_line_is_not_done(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = by_name(path)
    for name in first.missing("ab"):
        first.append({"name": name})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"name": "c", "val')  # killed in the middle of a line
    second = by_name(path)
    assert list(second.missing("abcd")) == ["c", "d"]
    assert path.read_bytes().startswith(whole + b'{"name": "c"')  # reading changes nothing
    second.append({"name": "c"})
    assert path.read_bytes() == whole + b'{"name": "c"}\n'


def test_no_row_is_begun_once_the_time_is_over(tmp_path):
    assert list(by_name(tmp_path / "rows.jsonl").missing("ab", seconds=-1)) == []


def test_a_later_row_counts_and_earlier_ones_are_kept(tmp_path):
    store = by_name(tmp_path / "rows.jsonl")
    for value in (1, 2):
        store.append({"name": "a", "value": value})
    assert store.done["a"]["value"] == by_name(tmp_path / "rows.jsonl").done["a"]["value"] == 2
    assert len(store.rows) == 2


def test_another_processs_rows_are_seen_and_not_done_again(tmp_path):
    one, other = by_name(tmp_path / "rows.jsonl"), by_name(tmp_path / "rows.jsonl")
    left = one.missing("abc")
    one.append({"name": next(left)})
    other.append({"name": "b"})
    assert next(left) == "c"
    one.append({"name": "c"})
    assert [row["name"] for row in by_name(tmp_path / "rows.jsonl").rows] == ["a", "b", "c"]


def _add(path, part):
    store = by_name(path)
    for index in range(50):
        store.append({"name": f"{part}-{index}", "filling": "x" * 5000})


def test_processes_that_add_to_one_file_lose_no_row_of_each_other(tmp_path):
    path, start = tmp_path / "rows.jsonl", multiprocessing.get_context("spawn").Process
    others = [start(target=_add, args=(path, part)) for part in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert set(by_name(path).done) == {f"{part}-{index}" for part in range(2) for index in range(50)}


@pytest.mark.parametrize("line", ["{", "[]", '{"other": 1}', "\xff"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"name": "a"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(StoreError, match=r"rows\.jsonl, line 2 is damaged"):
        by_name(path)


def test_without_a_path_rows_are_in_memory_alone():
    store = by_name(None)
    store.append({"name": "a"})
    assert list(store.missing("ab")) == ["b"]


def test_the_calibration_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    begun = []

    def job(name):
        begun.append(name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return {"verdict": "PASS"}

    monkeypatch.setattr(calibration, "jobs", lambda seeds: {n: lambda n=n: job(n) for n in ("one", "two", "three")})
    arguments = ["--output", str(tmp_path / "found"), "--readme", str(tmp_path / "none")]
    with pytest.raises(KeyboardInterrupt):
        calibration.main(arguments)
    calibration.main([*arguments, "--seconds", "-1"])
    assert "2 jobs left: two, three" in capsys.readouterr().out
    calibration.main(arguments)
    assert begun == ["one", "two", "two", "three"]
    done = calibration.results(calibration.open_store(tmp_path / "found.jsonl"))
    assert done == {name: {"verdict": "PASS"} for name in ("one", "two", "three")}


def test_the_three_are_one_kind_of_store(tmp_path):
    folder = RunFolder.open(tmp_path / "run", {})
    rows = [json.loads(line) for line in (calibration.COMMITTED).read_text().splitlines()]
    assert type(folder.store) is type(calibration.open_store()) is memory_table.Store
    assert calibration.open_store().rows == rows
    folder.close()
