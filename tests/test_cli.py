"""The command line: what it prints, what it refuses and how it ends."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from fixtures_cli import byte_tokenizer, question_file, tiny_checkpoint  # noqa: F401

from specjax import Engine, Nothing, cli, plugins, weights
from specjax.cli import generate, options
from specjax.language_model import LanguageModel
from specjax.model import PRESETS, Llama

PROMPT = "The sea, the sea."


def refused(capsys, *arguments):
    """The one line that a refused command prints."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("specjax: error: ")
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "eagle9"], "unknown drafter 'eagle9': choose from none, early-exit, external, fp8, ngram"),
        (["--drafter", "./absent.py:Mine"], "no drafter file absent.py"),
        (["--set", "depth=3"], "no drafter of this run has this field; theirs are"),
        (["--set", "ngram.depth=3"], "drafter 'ngram' has no field 'depth': its fields are num_speculative_tokens"),
        (["--drafter", "fp8", "--set", "ngram.prompt_lookup_max=3"], "'ngram' is not among the drafters of this run"),
        (["--set", "prompt_lookup_max"], "write FIELD=VALUE"),
        (["--set", "exit_layer=many"], "exit_layer='many': expected int"),
        (["--set", "exit_layer=3"], "exit_layer=3: must be 1 to 2 for a target of 3 layers"),
        (["--set", "num_speculative_tokens=0"], "num_speculative_tokens=0: must be at least 1"),
        (["--drafter", "ngram:num_speculative_tokens=256"], "must be smaller than the target's context of 256"),
        (["--drafter", "fp8:kv=borrowed"], "kv='borrowed': must be one of shared, own"),
        (["--temperature", "-1"], "temperature=-1.0: must be finite and >= 0"),
        (["--temperature", "nan"], "temperature=nan: must be finite"),
        (["--top-p", "0"], "top_p=0.0: must be finite and in (0, 1]"),
        (["--top-p", "1.5"], "top_p=1.5: must be finite and in (0, 1]"),
        (["--top-k", "-1"], "top_k=-1: must be finite and >= 0"),
        (["--min-p", "2"], "min_p=2.0: must be finite and in [0, 1]"),
        (["--dtype", "int3"], "invalid choice: 'int3' (choose from"),
        (["--rule", "hopeful"], "unknown rule 'hopeful': must be one of token"),
        (["--category", "poetry"], "unknown category 'poetry'"),
        (["--limit", "0"], "'0': must be an integer of at least 1"),
        (["--batch-size", "none"], "'none': must be an integer of at least 1"),
        (["--max-new-tokens", "-3"], "'-3': must be an integer of at least 0"),
        (["--max-new-tokens", "250"], "prompts with max_new_tokens=250 exceed the target's context of 256 tokens"),
        (["--limit", "2", "--all"], "not allowed with argument --limit"),
        (["--prompts", "absent.jsonl"], "no prompts in absent.jsonl"),
        (["--target", "gpt-17"], "no checkpoint 'gpt-17': give a path, a Hugging Face id (org/name), or one of"),
        (["--seed", "-1"], "'-1': must be an integer of at least 0"),
        (["--seed", "4294967296"], "'4294967296': must be smaller than 4294967296"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_compare_refuses_bad_input_in_one_line_before_it_reads_weights(
    arguments,
    message,
    checkpoint,
    questions,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr(weights.Checkpoint, "load", None)
    monkeypatch.chdir(tmp_path)
    command = ["compare", "--target", checkpoint, "--prompts", questions, "--out", tmp_path / "run", *arguments]
    assert message in refused(capsys, *command)
    assert not (tmp_path / "run").exists()


def test_a_drafter_file_that_raises_is_refused_with_its_error(checkpoint, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("1 / 0\n")
    message = refused(capsys, "generate", "hello", "--target", checkpoint, "--drafter", tmp_path / "mine.py")
    assert "raised ZeroDivisionError: division by zero" in message


def test_an_unknown_class_of_a_file_is_refused_with_those_that_it_has(checkpoint, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("from specjax import Drafter\nclass Mine(Drafter): ...\n")
    message = refused(capsys, "generate", "hello", "--target", checkpoint, "--drafter", f"{tmp_path / 'mine.py'}:Yours")
    assert "no drafter class 'Yours'" in message
    assert "it defines Mine" in message


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(prompt, checkpoint, capsys):
    assert "the prompt is empty" in refused(capsys, "generate", prompt, "--target", checkpoint)


def test_a_prompt_longer_than_the_context_is_refused(checkpoint, capsys):
    message = refused(capsys, "generate", "x" * 300, "--target", checkpoint, "--max-new-tokens", 4)
    assert "exceed the target's context of 256: shorten the prompt or lower --max-new-tokens" in message


def test_a_checkpoint_without_weights_is_refused(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert "has neither config.json nor" in refused(capsys, "generate", "hello", "--target", tmp_path / "model")


@pytest.mark.parametrize("arguments", [[], ["conquer"]])
def test_an_unknown_command_is_refused_with_the_known_ones(arguments, capsys):
    message = refused(capsys, *arguments)
    assert "compare" in message or "COMMAND" in message


def test_generate_streams_the_engines_text_and_then_its_statistics(checkpoint, capsys):
    arguments = ["generate", PROMPT, "--target", str(checkpoint), "--drafter", "none", "--max-new-tokens", "12"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr()
    opened, tokenizer = weights.open_checkpoint(str(checkpoint)), byte_tokenizer()
    [expected] = Engine(LanguageModel.of(Llama(opened.config), opened.load()), Nothing()).generate(
        [tokenizer.chat(PROMPT)], max_new_tokens=12, seed=0, end_ids=tokenizer.end_ids, capacity=256
    )
    assert shown.out == tokenizer.decode(expected.tokens) + "\n"
    assert "12 new ones, finish: length" in shown.err
    assert "acceptance length, pooled" in shown.err
    assert "tokens/s" in shown.err
    assert "greedy output" not in shown.err


def test_a_character_that_the_terminal_lacks_is_replaced(monkeypatch):
    def run(args):
        generate._print_pieces(["caf", "é …", "\udcff\n"])
        return 0

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    monkeypatch.setitem(sys.modules, "printing", types.SimpleNamespace(run=run, add_arguments=lambda parser: None))
    monkeypatch.setitem(cli.COMMANDS, "printing", ("printing", "prints"))
    assert cli.main(["printing"]) == 0
    assert raw.getvalue() == b"caf\xe9 ??\n"


@pytest.mark.parametrize(
    ("surroundings", "code", "said"),
    [
        ("> /dev/full", 1, "specjax: failed: the output can't be written (No space left on device)\n"),
        ("<&-", 0, ""),
        (">&-", 0, ""),
        ("2>&- >/dev/null", 0, ""),
        ("--drafter x", 2, "specjax: error: unrecognized arguments: --drafter x (see `specjax --help`)\n"),
    ],
)
def test_a_stream_that_is_full_or_closed_is_no_traceback(surroundings, code, said):
    command = f"'{Path(sys.executable).with_name('specjax')}' drafters {surroundings}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert (done.returncode, done.stderr) == (code, said)


LONG = "x" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        *(["compare", option, value] for value in (LONG, "~nosuch/x", "a\0b") for option in ("--target", "--drafter")),
        *(["compare", "--target", "CHECKPOINT", "--prompts", value] for value in (LONG, "~nosuch/x", "a\0b")),
        *(["generate", "hi", "--target", value] for value in (LONG, "~nosuch/x")),
        *(["memory", "--target", value] for value in (LONG, "~nosuch/x", "a\0b")),
        *(["memory", "--target", "llama-3.1-8b", "--device", value] for value in (LONG, "~nosuch/x")),
        *(["plan", "--device", "h100", "--drafter", value] for value in (LONG, "~nosuch/x:C")),
        *(["load", value] for value in (LONG, "~nosuch/x", "a\0b", "no\udcff")),
        *(["exactness", "--output", value] for value in (LONG, "no/such/x.json", "a\0b")),
        *(["exactness", "--rule", value] for value in (LONG, "~nosuch/x.py:R", "./\udcff.py:R")),
    ],
    ids=lambda arguments: "-".join(part[:9].replace("\0", "0").replace("\udcff", "ff") for part in arguments),
)
def test_a_name_that_no_file_can_have_is_one_line(arguments, checkpoint, capsys):
    arguments = [str(checkpoint) if part == "CHECKPOINT" else part for part in arguments]
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("specjax: error: ")
    assert said.count("\n") == 1


def test_a_folder_whose_name_is_no_utf8_holds_a_run(checkpoint, questions, tmp_path, capsys):
    folder = tmp_path / "caf\udce9"
    arguments = ["compare", "--target", str(checkpoint), "--prompts", str(questions), "--drafter", "ngram"]
    assert cli.main([*arguments, "--limit", "1", "--max-new-tokens", "4", "--out", str(folder)]) == 0
    assert json.loads((folder / "summary.json").read_text())["complete"] is True
    assert cli.main(["load", str(folder)]) == 0


def test_ctrl_c_ends_generate_after_its_round_with_text_and_statistics(checkpoint, monkeypatch, capsys):
    original = generate._print_pieces
    printed = []

    def print_pieces(pieces):
        printed.append(pieces)
        if len(printed) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        original(pieces)

    monkeypatch.setattr(generate, "_print_pieces", print_pieces)
    arguments = ["generate", PROMPT, "--target", str(checkpoint), "--drafter", "none", "--max-new-tokens", "12"]
    before = signal.getsignal(signal.SIGINT)  # a job in the background ignores it
    assert cli.main(arguments) == 130
    shown = capsys.readouterr()
    assert "4 new ones" in shown.err
    assert "acceptance length, pooled" in shown.err
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_preparing_is_130(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupt)
    assert cli.main(["generate", "hello"]) == 130
    assert capsys.readouterr().err == "specjax: interrupted\n"


def test_drafters_are_listed_with_their_settings(capsys):
    assert cli.main(["drafters"]) == 0
    shown = capsys.readouterr().out
    for name in plugins.available():
        assert f"\n{name}" in "\n" + shown
    assert "prompt_lookup_max=3" in shown
    assert "./file.py:Class" in shown


def test_settings_go_to_the_drafters_that_have_them_and_names_keep_equal_drafters_apart():
    built = options.load_drafters(
        ["none", "ngram", "ngram:num_speculative_tokens=3", "early-exit"],
        ["num_speculative_tokens=5", "early-exit.exit_layer=7", "prompt_lookup_max=4"],
    )
    assert built["none"] == Nothing()
    assert built["ngram"] == plugins.load_drafter("ngram", {"num_speculative_tokens": "5", "prompt_lookup_max": "4"})
    assert built["ngram:num_speculative_tokens=3"].num_speculative_tokens == 3
    assert built["early-exit"] == plugins.load_drafter("early-exit", {"num_speculative_tokens": "5", "exit_layer": "7"})


def test_ids_that_the_target_does_not_have_are_refused_before_anything_is_computed():
    config = dataclasses.replace(PRESETS["smollm2-135m"], vocab_size=257)
    target = LanguageModel("odd", Llama(config), byte_tokenizer())
    assert target.encode("hi", None, raw=True)
    with pytest.raises(ValueError, match=r"gives id 258 \('<\|im_end\|>'\), the target has 257 ids"):
        target.encode("hi", None)


def test_the_installed_command_answers_and_help_is_quick():
    command = [sys.executable, "-c", "import sys; from specjax.cli import main; sys.exit(main())", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "compare" in done.stdout
    assert "generate" in done.stdout
