"""Bad input is refused before anything is computed, with the value, the rule and the fix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects

from specjax import LanguageModel, plugins, testing
from specjax.drafter import Nothing
from specjax.engine import MAX_END_IDS, Engine, capacity_for
from specjax.model import Llama
from specjax.plugins import load_drafter


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    subjects.compile_quickly(monkeypatch)


@pytest.fixture
def engine(tiny):
    return Engine(LanguageModel.of(*tiny), load_drafter("ngram", {"num_speculative_tokens": "2"}))


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts: give at least one"),
        ([[]], {}, r"prompt 0 is empty: give at least one token"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 29]], {}, "prompt 0 has a token outside of the vocabulary of 29"),
        ([[-1]], {}, "prompt 0 has a token outside of the vocabulary of 29"),
        ([[1] * 257], {}, "prompt 0 of 257 tokens and max_new_tokens=4 exceed the target's context of 256"),
        ([[1] * 253], {}, "shorten the prompt or lower max_new_tokens"),
        ([[1] * 30], {"capacity": 32}, "need 34 cache slots, more than the capacity 32"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1: must be at least 0"),
        ([[1]], {"end_ids": list(range(MAX_END_IDS + 1))}, f"{MAX_END_IDS + 1} end ids: at most {MAX_END_IDS}"),
        ([[1]], {"capacity": 2, "max_new_tokens": 1}, "tokens=2: the window does not fit into 2 cache slots"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused_with_its_reason(engine, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, **({"max_new_tokens": 4, "seed": 0} | options))


def test_a_prompt_that_fills_the_context_but_for_one_token_gets_exactly_one(tiny):
    """No reserve for drafts leaks into what the user may ask for."""
    prompt = np.random.default_rng(0).integers(0, 29, 255).tolist()
    engine = Engine(LanguageModel.of(*tiny), load_drafter("ngram", {"num_speculative_tokens": "4"}))
    (got,) = engine.generate([prompt], max_new_tokens=1, seed=0)
    assert got.tokens == subjects.plain_greedy(*tiny, prompt, 1)[0]
    assert engine.generate([prompt], max_new_tokens=0, seed=0)[0].tokens == []


def test_seeds_have_no_default(engine):
    with pytest.raises(TypeError, match="seed"):
        engine.generate([[1]], max_new_tokens=1)


@pytest.mark.parametrize("tokens", [256, 1000])
def test_a_draft_as_long_as_the_context_is_refused(tiny, tokens):
    with pytest.raises(
        ValueError, match=f"num_speculative_tokens={tokens}: must be smaller than the target's context of 256"
    ):
        Engine(LanguageModel.of(*tiny), load_drafter("ngram", {"num_speculative_tokens": str(tokens)}))


@pytest.mark.parametrize("name", ["ngram", "early-exit", "external", "fp8"])
@pytest.mark.parametrize("tokens", [0, -1])
def test_a_drafter_that_drafts_nothing_is_refused_with_a_way_out(name, tokens):
    with pytest.raises(
        ValueError, match=f"num_speculative_tokens={tokens}: must be at least 1; use the drafter `none`"
    ):
        load_drafter(name, {"num_speculative_tokens": str(tokens)})


def test_the_drafter_none_refuses_to_draft():
    with pytest.raises(ValueError, match="num_speculative_tokens=3: the drafter `none` drafts none"):
        Nothing(3)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("early-exit", {"exit_layer": "3"}, "exit_layer=3: must be 1 to 2 for a target of 3 layers"),
        ("early-exit", {"exit_layer": "-1"}, "exit_layer=-1: must be 1 to 2"),
        ("external", {"keep_layers": "4"}, "keep_layers=4: must be 1 to 3"),
    ],
)
def test_a_drafter_that_does_not_fit_the_target_is_refused(tiny, spec, settings, message):
    with pytest.raises(ValueError, match=message):
        Engine(LanguageModel.of(*tiny), load_drafter(spec, settings))


def test_a_drafter_of_another_vocabulary_is_refused_with_both_sizes(tiny):
    """The preset is only described, never loaded."""
    with pytest.raises(
        ValueError, match="draft vocabulary 49152 ≠ target vocabulary 29: use a drafter that was trained"
    ):
        Engine(LanguageModel.of(*tiny), load_drafter("external", {"checkpoint": "smollm2-360m"}))


# Loading a drafter by name or by path.


def test_an_unknown_drafter_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown drafter 'medusa': choose from none, .*ngram.*, or name ./file.py:Class"
    ):
        load_drafter("medusa")


def test_an_unknown_field_is_refused_with_the_fields():
    with pytest.raises(
        ValueError, match=r"'ngram' has no field 'window': its fields are num_speculative_tokens, prompt"
    ):
        load_drafter("ngram", {"window": "3"})


def test_a_value_of_the_wrong_type_is_refused_with_an_example():
    with pytest.raises(ValueError, match="num_speculative_tokens='many': expected int, as in num_speculative_tokens=7"):
        load_drafter("ngram", {"num_speculative_tokens": "many"})


def test_fields_are_parsed_to_the_type_of_their_default():
    assert load_drafter("ngram", {"prompt_lookup_max": "5"}).prompt_lookup_max == 5
    assert load_drafter("early-exit", {"exit_norm": "true"}).exit_norm is True
    assert load_drafter("early-exit", {"exit_norm": "false"}).exit_norm is False
    with pytest.raises(ValueError, match="exit_norm='maybe': expected bool, as in exit_norm=False"):
        load_drafter("early-exit", {"exit_norm": "maybe"})


MINE = """
from dataclasses import dataclass
from specjax import Drafter

@dataclass(frozen=True)
class Mine(Drafter):
    width: int = 2

    def propose(self, keys, params, state, target):
        raise NotImplementedError
"""


def test_a_file_gives_its_only_drafter_or_the_named_one(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    assert load_drafter(str(path)).width == load_drafter(f"{path}:Mine", {"width": "2"}).width == 2
    path.write_text(MINE + MINE.replace("Mine", "Other").replace("2", "3"))
    assert load_drafter(f"{path}:Other").width == 3
    with pytest.raises(ValueError, match=r"defines 2 drafters \(Mine, Other\): name one, as file.py:Class"):
        load_drafter(str(path))
    with pytest.raises(ValueError, match="no drafter class 'Yours' in .*mine.py: it defines Mine, Other"):
        load_drafter(f"{path}:Yours")


def test_the_same_file_loaded_twice_gives_equal_drafters(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    first = load_drafter(str(path))
    assert first == load_drafter(str(path))
    path.write_text(MINE.replace("2", "3"))  # and an edited one its new content
    assert (first.width, load_drafter(str(path)).width) == (2, 3)


def test_a_drafter_file_that_is_missing_or_raises_is_named_with_its_error(tmp_path):
    with pytest.raises(ValueError, match=r"no drafter file .*gone.py"):
        load_drafter(str(tmp_path / "gone.py:Mine"))
    path = tmp_path / "broken.py"
    for text, error in (
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("import nowhere", "nowhere"),
    ):
        path.write_text(text)
        with pytest.raises(RuntimeError, match=f"drafter file .*broken.py raised .*{error}"):
            load_drafter(str(path))


def test_a_drafter_without_a_proposal_is_refused_when_it_is_made_and_one_that_raises_at_the_first_round(tiny, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    with pytest.raises(NotImplementedError):
        Engine(LanguageModel.of(*tiny), load_drafter(str(path))).generate([[1]], max_new_tokens=3, seed=0)
    path.write_text(MINE[: MINE.index("    def propose")])
    with pytest.raises(ValueError, match="Mine has no `propose` of its own: write one"):
        load_drafter(str(path))


# Results.


def test_an_end_id_finishes_a_row_and_is_emitted(tiny, greedy_texts, engine):
    (prompt, text), other = greedy_texts[2], greedy_texts[0]
    first, second, _ = engine.generate(
        [prompt, other[0], [1]], max_new_tokens=33, seed=0, end_ids=[text[4]], capacity=64
    )
    assert first.tokens == text[: text.index(text[4]) + 1]
    assert first.finish == "end"
    assert second.finish == ("end" if text[4] in other[1] else "length")


def test_a_prompt_that_contains_an_end_id_is_still_continued(tiny, greedy_texts, engine):
    prompt, text = greedy_texts[3]
    got = engine.generate([prompt] * 3, max_new_tokens=5, seed=0, end_ids=[prompt[0]], capacity=64)
    assert prompt[0] not in text[:5]
    assert got[0].tokens == text[:5]


def test_capacities_are_powers_of_two_so_that_few_shapes_are_compiled():
    assert {capacity_for(n) for n in range(1, 129)} == {128}
    assert {capacity_for(n) for n in range(129, 257)} == {256}


def test_counts_are_raw_and_add_up(tiny, greedy_texts, engine):
    for generation in engine.generate([p for p, _ in greedy_texts[:3]], max_new_tokens=20, seed=0, capacity=64):
        counts = generation.counts
        assert 1 + counts.emitted.sum() == len(generation.tokens) == 20
        assert (counts.accepted <= counts.tested).all()
        assert (counts.tested <= counts.drafted).all()
        assert (counts.drafted <= 2).all()
        assert (counts.emitted <= counts.accepted + 1).all()
        assert (counts.overlap <= counts.tested + 1e-5).all()


@pytest.mark.parametrize(
    ("index", "emitted", "accepted"),
    [(1, [1], [1]), (3, [3], [3]), (5, [5], [5]), (6, [6], [5]), (7, [6, 1], [5, 1])],
)
def test_a_round_that_meets_an_end_id_counts_what_was_emitted(index, emitted, accepted):
    """K = 5, all drafts right; the text is 1 2 3 ..., its end id at `index` of it."""
    laws = np.eye(12)[[*range(1, 12), 0, 0]]
    whole = np.tile(np.arange(32), (1, 1)) % 12
    engine = Engine(
        LanguageModel.of(testing.TableModel(12, order=1), testing.table_params(laws)), testing.Oracle(5),
        drafter_params={"tokens": jnp.asarray(whole, jnp.int32), "accept": jnp.asarray([5])},
    )  # fmt: skip
    (got,) = engine.generate([[0]], max_new_tokens=11, seed=0, end_ids=[index + 1], capacity=32)
    assert got.tokens == list(range(1, index + 2))
    assert (got.counts.emitted.tolist(), got.counts.accepted.tolist()) == (emitted, accepted)
    assert got.counts.cut[-1] == (index != 6)


def test_rejected_drafts_and_silence_are_not_counted_as_accepted():
    laws = np.eye(6)[[*range(1, 6), 0, 0]]
    model, params = testing.TableModel(6, order=1), testing.table_params(laws)
    (silent,) = Engine(LanguageModel.of(model, params), testing.Silent(3)).generate(
        [[0]], max_new_tokens=6, seed=0, capacity=32
    )
    assert silent.counts.drafted.tolist() == silent.counts.accepted.tolist() == [0] * 5
    (hostile,) = Engine(LanguageModel.of(model, params), testing.Hostile(3, end_id=5)).generate(
        [[0]], max_new_tokens=6, seed=0, capacity=32
    )
    assert hostile.tokens == silent.tokens == [1, 2, 3, 4, 5, 0]
    assert (hostile.counts.drafted <= 3).all()


def test_options_of_sampling_reach_every_row(tiny):
    engine = Engine(LanguageModel.of(*tiny), Nothing())
    settings = {"temperature": [0.0, 5.0, 5.0], "top_k": [0, 1, 0]}
    got = engine.generate([[3]] * 3, max_new_tokens=12, seed=0, capacity=64, **settings)
    assert got[0].tokens == got[1].tokens  # top-k of one is greedy at any temperature
    assert got[2].tokens != got[0].tokens


def test_available_names_every_drafter_with_a_line_about_it():
    assert set(plugins.available()) == {"none", "ngram", "early-exit", "external", "fp8"}
    assert all(line for line in plugins.available().values())


@pytest.mark.parametrize(
    ("name", "settings"), [("early-exit", {}), ("external", {}), ("fp8", {"kv": "own"}), ("fp8", {"kv": "shared"})]
)
def test_a_cache_of_padded_heads_gives_the_same_text_and_every_drafter_pads_its_own(tiny, greedy_texts, name, settings):
    model, params = tiny
    padded = Llama(dataclasses.replace(model.config, cache_lanes=16))
    assert model.config.head_dim == 8
    engine = Engine(LanguageModel.of(padded, params), load_drafter(name, settings))
    state = engine.start([greedy_texts[3][0]], max_new_tokens=2, seed=0)
    caches = [leaf for leaf in jax.tree.leaves((state.cache, state.drafter)) if leaf.ndim == 4]
    assert {leaf.shape[3] for leaf in caches} == {16}
    for prompt, text in greedy_texts[:4]:
        [answer] = engine.generate([prompt], max_new_tokens=12, seed=0)
        assert answer.tokens == text[:12]


@pytest.mark.parametrize("dtype", ["int8", "bool", jnp.int32])
def test_a_cache_in_a_dtype_without_fractions_is_refused(tiny, dtype):
    with pytest.raises(ValueError, match="must be a floating dtype"):
        Engine(LanguageModel.of(*tiny), cache_dtype=dtype)
