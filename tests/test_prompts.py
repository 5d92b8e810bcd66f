"""Prompt files and the fixed sample."""

import json
import time
from collections import Counter

import pytest
from fixtures_cli import PROMPTS, question_file  # noqa: F401

from specjax.evaluate import prompts


def test_the_built_in_set_has_at_least_60_prompts_of_seven_kinds():
    built_in = prompts.builtin()
    assert len(built_in.prompts) >= 60
    assert set(built_in.categories) == {
        "chat", "translation", "summarization", "qa", "math", "rag", "code_editing",
    }  # fmt: skip
    assert [prompt.row for prompt in built_in] == list(range(len(built_in.prompts)))


@pytest.mark.parametrize("limit", [1, 7, 14, 30, 60])
def test_a_sample_is_balanced_fixed_and_in_the_files_order(limit):
    chosen = prompts.select(prompts.builtin(), limit=limit)
    assert chosen == prompts.select(prompts.builtin(), limit=limit)
    assert len(chosen) == limit == len({prompt.question_id for prompt in chosen})
    counts = Counter(prompt.category for prompt in chosen).values()
    assert max(counts) - min(counts) <= 1
    assert [prompt.row for prompt in chosen] == sorted(prompt.row for prompt in chosen)


def test_a_share_takes_the_middles_of_equal_parts_by_length():
    rows = tuple(prompts.Prompt(str(i), "a", "x" * (10 - i), i) for i in range(10))
    one = prompts.select(prompts.PromptSet("file", rows, ""), limit=1)
    two = prompts.select(prompts.PromptSet("file", rows, ""), limit=2)
    assert [len(prompt.text) for prompt in one] == [6]
    assert sorted(len(prompt.text) for prompt in two) == [3, 8]


def test_a_small_category_gives_its_share_to_the_others():
    kinds = ["a"] * 1 + ["b"] * 5 + ["c"] * 5
    rows = tuple(prompts.Prompt(str(i), kind, "x", i) for i, kind in enumerate(kinds))
    chosen = prompts.select(prompts.PromptSet("file", rows, ""), limit=7)
    assert Counter(prompt.category for prompt in chosen) == {"a": 1, "b": 3, "c": 3}


def test_no_limit_and_a_large_one_take_every_prompt_of_the_categories():
    everything = prompts.select(prompts.builtin())
    assert len(everything) == len(prompts.builtin().prompts) == len(prompts.select(prompts.builtin(), limit=1000))
    assert {prompt.category for prompt in prompts.select(prompts.builtin(), ["rag", "qa"])} == {"rag", "qa"}


def test_spec_benchs_file_is_read_as_it_is(questions):
    found = prompts.load(questions)
    assert [prompt.question_id for prompt in found] == ["81", "82", "101"]
    assert [prompt.text for prompt in found] == [prompt["turns"][0] for prompt in PROMPTS]
    assert found.categories == ("writing", "math")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ('{"turns": ["a"]}\n{"turns": ', "line 2 is no JSON"),
        ('{"question_id": 1, "prompt": "a"}', "line 1 has no list of texts under `turns`"),
        ('{"turns": []}', "line 1 has no list of texts"),
        ('{"turns": ["  "]}', "line 1 is an empty prompt"),
        ('{"question_id": 1, "turns": ["a"]}\n{"question_id": "1", "turns": ["b"]}', "'1' stands there twice"),
        ('{"turns": ["a \\ud83d b"]}', "line 1 holds half a character"),
        ("[" * 100_000, "line 1 is no JSON"),
        ('{"question_id": "\\u001b[2J", "turns": ["a"]}', r"line 1: control character in '\\x1b\[2J'"),
        ('{"category": "a\\u0085", "turns": ["a"]}', "line 1: control character"),
    ],
)
def test_a_bad_file_is_refused_with_the_line_and_the_form(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        prompts.load(path)


def test_lines_end_with_a_line_feed_only_and_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"turns": ["a\u2028b\x85c"]}\r\n\n{"turns": ["d"]}'.encode())
    assert [prompt.text for prompt in prompts.load(path)] == ["a\u2028b\x85c", "d"]


def test_a_missing_file_and_an_unknown_category_are_refused(tmp_path, questions):
    with pytest.raises(ValueError, match="No such file"):
        prompts.load(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match=r"unknown category 'poetry': .* has writing, math"):
        prompts.select(prompts.load(questions), ["poetry"])


def test_a_row_is_a_prompts_place_in_its_file_whatever_the_sample(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"question_id": i, "category": "ab"[i % 2], "turns": ["x"]} for i in range(6)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert [prompt.row for prompt in prompts.select(prompts.load(path), ["b"])] == [1, 3, 5]


def test_a_double_id_among_many_prompts_is_refused_at_once(tmp_path):
    line = '{{"question_id": "{0}", "turns": ["x"]}}\n'
    file = tmp_path / "many.jsonl"
    file.write_text("".join(line.format(i) for i in range(60_000)) + line.format(59_999))
    begin = time.monotonic()
    with pytest.raises(ValueError, match="'59999' stands there twice"):
        prompts.load(file)
    assert time.monotonic() - begin < 5  # it took 47 s to count each id among all
