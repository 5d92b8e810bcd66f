"""The notebook of the README: what a researcher types, on a tiny checkpoint."""

import subprocess
import sys

import numpy as np
import pytest
from fixtures_cli import byte_tokenizer, tiny_checkpoint  # noqa: F401

import specjax
from specjax import weights

PROMPT = "Why is the sky blue?"


@pytest.fixture(scope="module", name="target")
def loaded_target(checkpoint):
    return specjax.load_target(str(checkpoint))


@pytest.fixture(scope="module", name="out")
def generated(target):
    engine = specjax.Engine(target, specjax.load_drafter("ngram", num_speculative_tokens=7))
    return engine.generate([PROMPT], max_new_tokens=24, temperature=0.7, seed=0)


def test_the_notebook_runs_as_it_stands(checkpoint):
    target = specjax.load_target(str(checkpoint))
    drafter = specjax.load_drafter("ngram", num_speculative_tokens=7)
    out = specjax.Engine(target, drafter).generate([PROMPT], max_new_tokens=24, temperature=0.7, seed=0)
    assert out[0].text == byte_tokenizer().decode(out[0].tokens)
    summary = specjax.summarize(out)
    assert summary.acceptance_length == out[0].acceptance_length >= 1
    account = specjax.account(target, drafter, batch=8, context=256, device="h100")
    assert "usable on h100" in repr(account)
    assert account.peak_bytes > 0
    assert account.added_bytes["weights"] == 0


def test_a_drafter_by_its_text_is_the_same(target, out):
    again = specjax.Engine(target, "ngram:num_speculative_tokens=7").generate(
        [PROMPT], max_new_tokens=24, temperature=0.7, seed=0
    )
    assert again[0].tokens == out[0].tokens


def test_text_goes_through_the_chat_template_and_ids_as_they_are(target):
    engine, tokenizer = specjax.Engine(target), byte_tokenizer()
    options = {"max_new_tokens": 8, "seed": 0, "rows": [0, 0, 1]}
    text, ids, system = engine.generate([PROMPT, tokenizer.chat(PROMPT), PROMPT], **options)
    assert text.tokens == ids.tokens
    [told] = engine.generate([PROMPT], max_new_tokens=8, seed=0, system="Be brief.")
    [chat] = engine.generate([tokenizer.chat(PROMPT, "Be brief.")], max_new_tokens=8, seed=0)
    assert told.tokens == chat.tokens
    assert system.tokens == text.tokens  # greedy: a row's number decides nothing


def test_the_tokenizers_end_ids_end_a_text_unless_others_are_given(target):
    engine = specjax.Engine(target)
    [long] = engine.generate([PROMPT], max_new_tokens=12, seed=0, end_ids=())
    [short] = engine.generate([PROMPT], max_new_tokens=12, seed=0, end_ids=[long.tokens[3]])
    assert (len(long.tokens), long.finish, short.finish) == (12, "length", "end")
    assert np.array_equal(engine.start([PROMPT], max_new_tokens=1, seed=0).end_ids[:1], target.tokenizer.end_ids[:1])


def test_a_stream_yields_what_generate_returns(target, out):
    def pieces():
        got = yield from engine.stream(PROMPT, max_new_tokens=24, temperature=0.7, seed=0)
        whole.append(got)

    engine, whole = specjax.Engine(target, "ngram"), []
    seen = [token for piece in pieces() for token in piece]
    assert seen == whole[0].tokens == out[0].tokens
    assert whole[0].text == out[0].text


def test_settings_of_sampling_are_one_for_all_or_one_a_row(target):
    engine = specjax.Engine(target)
    got = engine.generate([PROMPT] * 3, max_new_tokens=12, seed=0, temperature=[0.0, 5.0, 5.0], top_k=[0, 1, 0])
    assert got[0].tokens == got[1].tokens != got[2].tokens
    with pytest.raises(ValueError, match=r"top_p=0: must be finite and in \(0, 1\]"):
        engine.generate([PROMPT], max_new_tokens=1, seed=0, top_p=0)


def test_a_prompt_that_is_no_list_of_prompts_is_refused(target):
    with pytest.raises(ValueError, match="put a single one into a list"):
        specjax.Engine(target).generate(PROMPT, max_new_tokens=1, seed=0)


def test_text_without_a_tokenizer_is_refused_and_ids_give_none(tiny):
    engine = specjax.Engine(specjax.LanguageModel.of(*tiny))
    with pytest.raises(ValueError, match="in memory has no tokenizer: give token ids instead of text"):
        engine.generate([PROMPT], max_new_tokens=1, seed=0)
    assert engine.generate([[1]], max_new_tokens=1, seed=0)[0].text is None


def test_results_print_well(target, out):
    assert repr(target) == "<tiny: 3 layers, 259 ids, context of 256, float32>"
    assert "24 tokens in" in repr(out)
    assert repr(out).startswith("[0] <24 tokens in")
    assert "ngram" in repr(specjax.Engine(target, "ngram")).lower()
    assert out._repr_html_().count("<tr>") == 2
    angle = specjax.Generations([specjax.Generation([1], out[0].counts, "end", "<b>&")])
    for shown in (angle._repr_html_(), angle[0]._repr_html_()):
        assert "&lt;b&gt;&amp;" in shown
    assert repr(specjax.Generations()) == "no generations"


def test_weights_are_read_when_they_are_first_used(checkpoint, monkeypatch):
    monkeypatch.setattr(weights.Checkpoint, "load", None)
    target = specjax.load_target(str(checkpoint))
    drafter = specjax.load_drafter("external")
    target.check(drafter)
    assert target.fingerprint.sha256
    account = specjax.account(target, drafter, batch=1, context=256)
    assert account.added_bytes["weights"] > 0
    with pytest.raises(ValueError, match=r"unknown device 'abacus': choose from"):
        specjax.account(target, drafter, batch=1, context=256, device="abacus")


def test_a_trained_drafter_remembers_the_file_of_its_target(checkpoint, target, tmp_path):
    drafter = specjax.load_drafter("fp8", num_speculative_tokens=2)
    own = specjax.Engine(target, drafter).drafter_params
    weights.save_drafter(tmp_path / "mine", drafter, own, target=target.fingerprint, provenance={"steps": 0})
    again = specjax.load_target(str(checkpoint))
    [got] = specjax.Engine(again, str(tmp_path / "mine")).generate([PROMPT], max_new_tokens=8, seed=0)
    [plain] = specjax.Engine(again).generate([PROMPT], max_new_tokens=8, seed=0)
    assert got.tokens == plain.tokens


def test_importing_specjax_waits_for_nothing():
    program = "import sys, specjax; print('jax' in sys.modules, specjax.__version__, specjax.Draft, dir(specjax))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("False 0.1.0 <class 'specjax.types.Draft'>")
    assert "load_target" in shown


def test_every_public_name_is_there():
    for name in specjax.__all__:
        assert getattr(specjax, name) is not None
    with pytest.raises(AttributeError, match="module 'specjax' has no attribute 'eagle'"):
        specjax.eagle  # noqa: B018
