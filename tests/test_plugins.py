"""Drafters and rules by name, file and folder: one grammar, and folders that hold what was trained."""

import dataclasses
import json
import shutil
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects

from specjax import Engine, LanguageModel, decode, plugins, testing, verify, weights
from specjax.drafter import Drafter, Nothing
from specjax.model import Llama
from specjax.model.config import RopeScaling
from specjax.plugins import load_drafter, load_rule
from specjax.weights.safetensors_file import read_header, write

HEAD = """
from dataclasses import dataclass
import jax, jax.numpy as jnp
from specjax import Draft, Drafter

@dataclass(frozen=True)
class Head(Drafter):
    'a table of successors, with whole numbers and a scalar beside it'
    layers: tuple[int, ...] = ()
    width: float = 1.0
    checkpoint: str = ""

    def init_params(self, key, model, target_params):
        successors = jax.random.randint(key, (model.vocab_size, 1), 0, model.vocab_size, jnp.int32)
        return {"successors": successors, "scale": jnp.ones(()), "layers": {0: {"w": jnp.ones((3, 2))}}}

    def propose(self, keys, params, state, target):
        last = jnp.take_along_axis(target.tokens, target.length[:, None] - 1, 1)
        drafts = []
        for _ in range(self.num_speculative_tokens):
            last = jnp.take(params["successors"][:, 0], last)
            drafts.append(last)
        return Draft(jnp.concatenate(drafts, 1), None, target.cache, state)
"""
PROVENANCE = {"data": "none", "steps": 3}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "head.py"
    path.write_text(HEAD)
    return path


@pytest.fixture
def target(tiny):
    return LanguageModel.of(*tiny)


@pytest.fixture
def folder(tmp_path, file, target):
    """A trained Head."""
    return save(tmp_path / "trained", load_drafter(str(file), layers=(2, 3)), target)


def save(folder, drafter, target, **options):
    params = drafter.init_params(jax.random.key(7), target.model, target.params)
    weights.save_drafter(folder, drafter, params, target=target.fingerprint, provenance=PROVENANCE, **options)
    return folder


def weights_of(drafter, target):
    return drafter.params(jax.random.key(0), target.model, target.params)


# The grammar.


@pytest.mark.parametrize(
    ("spec", "name", "settings"),
    [
        ("ngram", "ngram", {}),
        ("ngram:prompt_lookup_max=2", "ngram", {"prompt_lookup_max": "2"}),
        ("fp8:kv=own,num_speculative_tokens=3", "fp8", {"kv": "own", "num_speculative_tokens": "3"}),
        ("external:llama-3.1-8b", "external", {"checkpoint": "llama-3.1-8b"}),
        ("external:org/model,keep_layers=2", "external", {"checkpoint": "org/model", "keep_layers": "2"}),
        ("external:./run/lr=0.1", "external", {"checkpoint": "./run/lr=0.1"}),
        ("./f.py", "./f.py", {}),
        ("./f.py:C", "./f.py:C", {}),
        ("./f.py:C:k=1", "./f.py:C", {"k": "1"}),
        ("./f.py:k=1", "./f.py", {"k": "1"}),
        ("./f.py:C:./folder", "./f.py:C", {"checkpoint": "./folder"}),
        ("./f.py:C:layers=2,5,8,k=1", "./f.py:C", {"layers": "2,5,8", "k": "1"}),
        ("./folder", "./folder", {}),
        ("./folder:num_speculative_tokens=3", "./folder", {"num_speculative_tokens": "3"}),
    ],
)
def test_one_grammar_names_all(spec, name, settings):
    assert plugins.split(spec) == (name, settings)


def test_what_stands_behind_a_name_goes_before_settings_and_python_before_both():
    assert load_drafter("ngram:prompt_lookup_max=5", {"prompt_lookup_max": "4"}).prompt_lookup_max == 5
    drafter = load_drafter("ngram:prompt_lookup_max=5", {"num_speculative_tokens": "2"}, prompt_lookup_max=6)
    assert (drafter.prompt_lookup_max, drafter.num_speculative_tokens) == (6, 2)


@dataclass(frozen=True)
class Fields:
    flag: bool = False
    count: int = 1
    share: float = 1
    ratio: float = 0.5
    name: str = "a"
    layers: tuple[int, ...] = (1,)
    shares: tuple[float, ...] = ()
    perhaps: int | None = None
    other: Drafter = dataclasses.field(default_factory=Nothing)
    derived: int = dataclasses.field(default=0, init=False)


@pytest.mark.parametrize(
    ("field", "given", "value"),
    [
        ("flag", "yes", True), ("flag", "0", False), ("flag", True, True),
        ("count", "3", 3), ("count", 3, 3), ("count", np.int64(3), 3),
        ("ratio", "2", 2.0), ("ratio", 2, 2.0),
        ("name", "b", "b"),
        ("layers", "2,5,8", (2, 5, 8)), ("layers", "(2, 5)", (2, 5)), ("layers", [2, 5], (2, 5)), ("layers", "", ()),
        ("shares", "0.5,1", (0.5, 1.0)),
        ("perhaps", "4", 4), ("perhaps", None, None),
        ("other", Nothing(), Nothing()),
    ],
)  # fmt: skip
def test_values_get_the_types_of_their_fields(field, given, value):
    got = plugins.fields.parse(Fields, "these", {field: given})[field]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("field", "given", "message"),
    [
        ("flag", "maybe", "flag='maybe': expected bool, as in flag=False"),
        ("flag", 2, "flag=2: expected bool"),
        ("count", "many", "count='many': expected int, as in count=1"),
        ("count", 2.5, "count=2.5: expected int"),
        ("count", True, "count=True: expected int"),
        ("count", float("inf"), "count=inf: expected int"),
        ("ratio", "half", "ratio='half': expected float, as in ratio=0.5"),
        ("name", 3, "name=3: expected str"),
        ("layers", "2,x", "layers='2,x': expected ints, as in layers=2,5,8"),
        ("layers", 3, "layers=3: expected ints"),
        ("other", "ngram", "other='ngram': expected a value of type .*Drafter.*build the drafter in Python"),
        ("derived", 3, "these has no field 'derived': its fields are flag, count, "),
    ],
)
def test_a_value_of_another_type_is_refused_with_an_example(field, given, message):
    with pytest.raises(ValueError, match=message):
        plugins.fields.parse(Fields, "these", {field: given})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("medusa", r"unknown drafter 'medusa': choose from none, .*ngram.*, or name ./file.py:Class"),
        ("ngram:window=3", "'ngram' has no field 'window': its fields are num_speculative_tokens, prompt"),
        ("ngram:./folder", "'ngram' has no field 'checkpoint'"),
        ("early-exit:checkpoint=./absent", "no trained drafter at absent: a folder with a drafter.json is one"),
        ("./absent.py:Mine", "no drafter file absent.py"),
        ("./f.py:a-b:k=1", "'a-b' is no name of a class"),
    ],
)
def test_a_drafter_that_there_is_not_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(spec)


CLASSES = """
from dataclasses import dataclass
from specjax import Drafter


class KeywordOnly(Drafter):
    def __init__(self, *, window):
        self.window = window

    def propose(self, keys, params, state, target):
        return None


@dataclass(frozen=True)
class Raising(Drafter):
    num_speculative_tokens: int = 3

    def __post_init__(self):
        raise KeyError("lost")

    def propose(self, keys, params, state, target):
        return None


class Unhashable(Raising):
    __hash__ = None

    def __post_init__(self):
        pass


@dataclass(frozen=True)
class Silent(Drafter):
    num_speculative_tokens: int = 3
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("KeywordOnly", "KeywordOnly can't be made: TypeError: .* missing 1 required keyword-only argument"),
        ("Raising", "Raising can't be made: KeyError: 'lost'"),
        (
            "Unhashable",
            "Unhashable can't be made: TypeError: unhashable type: 'Unhashable'; make it a frozen dataclass",
        ),
        ("Silent", "Silent has no `propose` of its own: write one"),
    ],
)
def test_a_class_of_which_no_drafter_can_be_made_is_refused_with_its_name(tmp_path, name, message):
    path = tmp_path / "classes.py"
    path.write_text(CLASSES)
    with pytest.raises((ValueError, RuntimeError), match=message):
        load_drafter(f"{path}:{name}")


# Rules.


def test_rules_have_names_and_fields():
    assert load_rule("token") == verify.Token()
    assert load_rule("lenient:lenience=0.95") == verify.Lenient(0.95)
    for spec, message in (
        ("hopeful", "unknown rule 'hopeful': must be one of token, match, .*or ./file.py:Class"),
        ("token:lenience=1", "rule 'token' has no field 'lenience'"),
        ("lenient:lenience=much", "lenience='much': expected float, as in lenience=0.9"),
        ("./absent.py", "no rule file absent.py"),
    ):
        with pytest.raises(ValueError, match=message):
            load_rule(spec)


def test_a_rule_of_ones_own_is_a_file_and_never_exact(tmp_path, target):
    path = tmp_path / "rule.py"
    text = "from dataclasses import dataclass\nfrom specjax.verify import Token\n@dataclass(frozen=True)\n"
    path.write_text(text + "class Mine(Token):\n    share: float = 1.0\n")
    rule = load_rule(f"{path}:Mine:share=0.5")
    assert rule.share == load_rule(f"{path}:share=0.5").share == 0.5
    assert not verify.is_exact(rule)
    engine = Engine(target, "ngram", rule=f"{path}:Mine")
    assert not engine.program.exact
    with pytest.raises(ValueError, match="no rule class 'Yours' in .*rule.py: it defines Mine"):
        load_rule(f"{path}:Yours")


# Trained drafters.


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
@pytest.mark.parametrize("spec", ["early-exit:exit_norm=true,exit_layer=1", "fp8:kv=own", "{file}:Head:layers=2,3"])
def test_a_folder_gives_back_class_fields_and_weights(tmp_path, file, target, spec, format):
    drafter = load_drafter(spec.format(file=file), num_speculative_tokens=2)
    folder = save(tmp_path / "trained", drafter, target, format=format)
    opened = load_drafter(str(folder))
    assert dataclasses.asdict(opened) == dataclasses.asdict(drafter) | {"checkpoint": str(folder)}
    wanted = drafter.init_params(jax.random.key(7), target.model, target.params)
    got = weights_of(opened, target)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    assert opened.label == ""
    assert opened == load_drafter(str(folder))
    assert load_drafter(f"{folder}:num_speculative_tokens=3").num_speculative_tokens == 3
    assert load_drafter(f"{spec.format(file=file)},checkpoint={folder}").checkpoint == str(folder)
    assert weights.read_card(folder).provenance == PROVENANCE
    assert {path.name for path in opened.files} >= {"drafter.json"}


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_a_trained_external_drafter_is_a_model_with_a_card(tmp_path, target, format):
    drafter = load_drafter("external", keep_layers=2)
    config = drafter.model(target.model).config
    with pytest.raises(ValueError, match=r"neither config\.json nor model\.json"):
        load_drafter(str(save(tmp_path / "incomplete", drafter, target, format=format)))
    folder = save(tmp_path / "trained", drafter, target, format=format, config=config)
    opened = load_drafter(str(folder))
    wanted = drafter.init_params(jax.random.key(7), target.model, target.params)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, weights_of(opened, target), wanted))
    assert weights.open_checkpoint(str(folder)).config == config
    assert load_drafter(f"external:{folder}").keep_layers == 0  # whose fields were not asked for
    with pytest.raises(ValueError, match="holds a trained external, not early-exit"):
        load_drafter(f"early-exit:{folder}")


def test_a_checkpoint_written_anew_at_its_path_is_another_drafter(tmp_path, target):
    """Fault: drafters equal by their path share a compiled program, and with it the old file's description."""
    text = [int(token) for token in np.random.default_rng(0).integers(0, 29, 40)]
    llama3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=32)
    config, drafted = target.model.config, []
    for changes in ({"rope_theta": 1e6}, {"rope_theta": 10.0, "rope_scaling": llama3}):
        written = dataclasses.replace(config, **changes)
        shutil.rmtree(tmp_path / "draft", ignore_errors=True)
        weights.save(tmp_path / "draft", written, target.params)
        engine = Engine(target, f"external:{tmp_path / 'draft'},num_speculative_tokens=3")
        state = engine.start([text], max_new_tokens=8, seed=0)
        first = int(state.tokens[0, len(text)])
        draft = decode.propose(engine.program, engine.params, engine.drafter_params, state)
        drafted.append(draft.tokens[0].tolist())
        own = LanguageModel.of(Llama(written), target.params)
        [alone] = Engine(own).generate([[*text, first]], max_new_tokens=3, seed=0)
        assert drafted[-1] == alone.tokens
    assert drafted[0] != drafted[1]


def test_a_folder_needs_no_source_beside_it_and_decodes(folder, file, target):
    file.unlink()
    drafter = load_drafter(str(folder))
    assert drafter.layers == (2, 3)
    [got] = Engine(target, str(folder)).generate([[3, 4]], max_new_tokens=6, seed=0)
    assert got.tokens == subjects.plain_greedy(target.model, target.params, [3, 4], 6)[0]


def test_weights_are_cast_to_what_the_target_needs(folder, target):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim else leaf, {"w": jnp.ones((3, 2))})
    drafter = load_drafter(str(folder))
    like = drafter.init_params(jax.random.key(0), target.model, target.params)
    like["layers"][0]["w"] = half["w"]
    assert weights.load_drafter_params(drafter, like)["layers"][0]["w"].dtype == jnp.bfloat16


def test_nothing_is_read_while_a_drafter_is_made_or_traced(folder, target, monkeypatch):
    monkeypatch.setattr(weights.trained, "open_arrays", None)
    drafter = load_drafter(str(folder))
    jax.eval_shape(lambda key: drafter.init_params(key, target.model, target.params), jax.random.key(0))


def rewrite(folder, change):
    """Change the tensors of a folder, as a faulty training would have written them."""
    path = folder / "model.safetensors"
    arrays = weights.arrays.open_arrays(folder)
    tensors = dict(arrays.tensors(arrays.outline()))
    change(tensors)
    write(path, tensors)
    edit(folder, lambda card: card["files"].update({path.name: weights.checkpoint.sha256_of(path)}))


def edit(folder, change):
    card = json.loads((folder / "drafter.json").read_text())
    change(card)
    (folder / "drafter.json").write_text(json.dumps(card))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.0.w"), r"tensor layers\.0\.w is missing \(2 of 3 are there\).*trained"),
        (lambda t: t.update(more=jnp.ones(2)), r"tensor more \(2,\) is no part of the drafter.*trained"),
        (lambda t: t.update({"layers.0.w": jnp.ones((3, 3))}), r"w has shape \(3, 3\), the drafter needs .*trained"),
        (lambda t: t.update(successors=t["successors"].astype(jnp.float32)), "is float32, the drafter needs int32"),
        (lambda t: t.update(scale=jnp.asarray(jnp.nan)), r"tensor scale in .*model\.safetensors holds NaN or Inf"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(folder, target, change, message):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        weights_of(load_drafter(str(folder)), target)


def test_damaged_files_are_named(folder, target):
    drafter, path = load_drafter(str(folder)), folder / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-5], whole[:-1] + b"\xff", b""):
        path.write_bytes(damaged)
        with pytest.raises(weights.DamagedFile, match=r"model\.safetensors is damaged or was changed"):
            weights_of(drafter, target)
    path.write_bytes(whole[:-5])  # and where the card was written over a truncated file
    edit(folder, lambda card: card["files"].update({path.name: weights.checkpoint.sha256_of(path)}))
    with pytest.raises(weights.DamagedFile, match=r"model\.safetensors is truncated or damaged"):
        weights_of(drafter, target)
    path.unlink()
    with pytest.raises(weights.DamagedFile, match=r"model\.safetensors is missing: copy the folder again"):
        weights_of(drafter, target)


def test_a_damaged_orbax_folder_is_named(tmp_path, file, target):
    folder = save(tmp_path / "trained", load_drafter(str(file)), target, format="orbax")
    drafter = load_drafter(str(folder))
    largest = max((folder / "weights").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:-3])
    with pytest.raises(weights.DamagedFile, match=f"{largest.name} is damaged or was changed"):
        weights_of(drafter, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda card: card.pop("class"), "describes no drafter .*'class'.*save it again"),
        (lambda card: card.update(fields=3), "describes no drafter"),
        (lambda card: card.update(target={}), "describes no drafter"),
        (lambda card: card.update(format=99), "has format 99: this specjax reads format 1"),
        (lambda card: card.update({"class": "medusa"}), "a trained 'medusa', of which this specjax knows"),
        (lambda card: card.update({"class": "head.py:Body"}), "no drafter class 'Body' in .*head.py: it defines Head"),
        (lambda card: card["fields"].update(depth=3), r"drafter\.json has no field 'depth': its fields are"),
        (lambda card: card["fields"].update(width="wide"), "width='wide': expected float"),
    ],
)  # fmt: skip
def test_a_card_that_makes_no_sense_is_refused(folder, change, message):
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        load_drafter(str(folder))
    (folder / "drafter.json").write_text("{")
    with pytest.raises(ValueError, match=r"drafter\.json is no JSON"):
        load_drafter(str(folder))


def test_a_drafter_of_another_class_is_refused_but_an_edited_source_is_not(folder, file):
    file.write_text(HEAD + "\n# edited\n")
    assert load_drafter(f"{file}:Head:{folder}").checkpoint == str(folder)
    file.write_text(HEAD.replace("Head", "Body"))
    with pytest.raises(ValueError, match=r"holds a trained head\.py:Head, not head\.py:Body"):
        load_drafter(f"{file}:Body:{folder}")
    with pytest.raises(ValueError, match=r"holds a trained head\.py:Head, not early-exit"):
        load_drafter(f"early-exit:checkpoint={folder}")


def test_another_target_is_refused_before_its_weights_are_read(folder, target, tiny):
    model, params = tiny
    other = LanguageModel.of(model, jax.tree.map(lambda leaf: leaf * 1.01, params), name="other")
    with pytest.raises(ValueError, match=r"was trained for in memory with weights \w+; those of other are \w+"):
        Engine(other, str(folder))
    wider = LanguageModel.of(*testing.tiny_model(vocab_size=40), name="wider")
    with pytest.raises(ValueError, match=r"was trained for in memory with \w+=\d+; wider has \d+"):
        Engine(wider, str(folder))
    edit(folder, lambda card: card["target"].pop("sha256"))
    assert Engine(other, str(folder)).drafter_params  # if this is meant


def test_what_can_not_be_opened_again_is_not_saved(tmp_path, target, file):
    @dataclass(frozen=True)
    class Local(Drafter):
        checkpoint: str = ""

        def init_params(self, key, model, target_params):
            return {"w": jnp.ones(1)}

    with pytest.raises(ValueError, match="Local is not defined in a file, so that a folder"):
        save(tmp_path / "a", Local(), target)
    with pytest.raises(ValueError, match="has no weights of its own: there is nothing to save"):
        save(tmp_path / "a", load_drafter("early-exit"), target)
    file.write_text(HEAD.replace('    checkpoint: str = ""\n', ""))
    with pytest.raises(ValueError, match="Head has no field for its folder: declare `checkpoint"):
        save(tmp_path / "a", load_drafter(str(file)), target)
    with pytest.raises(ValueError, match="format='pickle': must be one of safetensors, orbax"):
        save(tmp_path / "b", load_drafter("fp8"), target, format="pickle")
    assert not (tmp_path / "a").exists()
    save(tmp_path / "c", load_drafter("fp8"), target)
    with pytest.raises(FileExistsError):
        save(tmp_path / "c", load_drafter("fp8"), target)


def test_our_safetensors_are_those_of_the_library(tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.asarray(3, np.int32), "c": np.zeros((0, 2))}
    write(tmp_path / "ours.safetensors", {name: jnp.asarray(value) for name, value in tensors.items()})
    for name, value in load_file(tmp_path / "ours.safetensors").items():
        np.testing.assert_array_equal(value, tensors[name])
    save_file(tensors, tmp_path / "theirs.safetensors")
    assert {name: entry.shape for name, entry in read_header(tmp_path / "theirs.safetensors").items()} == {
        name: value.shape for name, value in tensors.items()
    }
