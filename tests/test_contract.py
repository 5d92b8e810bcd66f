"""The rules of `specjax/drafter.py`, held against every drafter of the repository, and against broken ones."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects
from subjects import CAPACITY, run_rows

from specjax import LanguageModel, decode, plugins, sampling, testing
from specjax.drafter import Drafter, Nothing, Wrapper
from specjax.engine import Engine
from specjax.testing import ContractError, check_drafter
from specjax.types import Draft

K = 3
ALL = {"none": Nothing(), **subjects.drafters(K)}
PROMPTS = [[5], [3, 4, 5, 3, 4, 5], [7, 7, 7, 7, 7, 7, 7, 7]]

DRAFTERS = Path(__file__).parent.parent / "drafters"

every_drafter = pytest.mark.parametrize("name", ALL)


def test_every_drafter_of_the_repository_is_tested():
    files = {name.removesuffix("-shared").removesuffix("-own") for name in ALL}
    assert set(plugins.available()) == files
    assert {path.stem.replace("_", "-") for path in DRAFTERS.glob("[!_]*.py")} <= files


@every_drafter
def test_a_drafter_keeps_the_contract(tiny, name):
    check_drafter(ALL[name], target=tiny)
    chosen = ALL[name]
    assert all(
        f"{f.name}=" in repr(chosen) for f in dataclasses.fields(chosen) if f.repr
    )  # it prints itself in reports
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.num_speculative_tokens = 5


@every_drafter
def test_an_equal_drafter_another_prompt_temperature_limit_or_seed_compiles_nothing(tiny, name):
    model, params = tiny
    weights = ALL[name].params(jax.random.key(0), model, params)
    run_rows(model, params, ALL[name], weights, PROMPTS, 9)
    sizes = subjects.compilations()
    again = dataclasses.replace(ALL[name])
    sampler = sampling.make_sampling(3, 0.7, top_k=5, top_p=0.9, min_p=0.1)
    run_rows(
        model,
        params,
        again,
        weights,
        [[1, 2], [3], [4] * 9],
        [0, 1, 20],
        seed=9,
        rows=[4, 1, 8],
        end_ids=[2],
        sampler=sampler,
    )
    assert subjects.compilations() == sizes


SUMMING = ("reads hidden states beyond count", "reads hidden states beyond count in rounds", "forgets a chunk")


@dataclasses.dataclass(frozen=True)
class Broken(Wrapper):
    """A drafter with one fault."""

    fault: str = ""

    def params(self, key, model, target_params):
        return target_params if self.fault == "borrowed weights" else super().params(key, model, target_params)

    def observe(self, params, state, seen):
        if self.fault == "state in another dtype" and seen.verified is not None:
            return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
        if self.fault == "reads hidden states beyond count":
            return state | {"sum": state["sum"] + seen.hidden[0].sum((1, 2))}
        if self.fault == "reads hidden states beyond count in rounds":
            read = seen.hidden[0].sum((1, 2)) if seen.verified is not None else 0.0
            return state | {"sum": state["sum"] + read}
        if self.fault == "forgets a chunk":
            return state | {"sum": seen.start.astype(jnp.float32)}
        return super().observe(params, state, seen)

    def init(self, params, model, batch, capacity, dtype):
        if self.fault in SUMMING:
            return {"sum": jnp.zeros((batch,), jnp.float32)}
        return super().init(params, model, batch, capacity, dtype)

    def tapped_layers(self, model):
        return (1,) if self.fault in SUMMING else ()

    def propose(self, keys, params, state, target):
        if self.fault in SUMMING:
            return dataclasses.replace(testing.Silent(2).propose(keys, params, (), target), state=state)
        if self.fault == "reads a token ahead":
            ahead = jnp.take_along_axis(target.tokens, target.length[:, None] + jnp.arange(2)[None], 1)
            return Draft(ahead, None, target.cache, state)
        draft = super().propose(keys, params, state, target)
        if self.fault == "looks at its neighbours":
            return dataclasses.replace(draft, tokens=jnp.broadcast_to(target.tokens[:1, :1], (3, 2)), log_q=None)
        if self.fault == "writes a committed slot":
            layers = jax.tree.map(lambda leaf: leaf.at[:, :, 0].set(0), draft.cache)
            return dataclasses.replace(draft, cache=layers)
        if self.fault == "draws from another law":
            hot = sampling.log_probs(3 * draft.log_q, target.sampling)
            return dataclasses.replace(draft, log_q=hot)
        if self.fault == "does not add up":
            return dataclasses.replace(draft, log_q=draft.log_q + 0.1)
        if self.fault == "counts too many":
            return dataclasses.replace(draft, count=jnp.full((3,), 3, jnp.int32))
        if self.fault == "wrong dtype":
            return dataclasses.replace(draft, log_q=draft.log_q.astype(jnp.bfloat16))
        return draft

    def log_probs(self, params, text):
        if self.fault == "trains on other positions":
            return super().log_probs(params, dataclasses.replace(text, positions=text.positions - 1))
        return super().log_probs(params, text)


FAULTS = {
    "borrowed weights": "has no array of the target among its weights",
    "state in another dtype": "hands back what has the declared form. Broken: its state must keep its tree",
    "reads hidden states beyond count": "does not read what is not real of `seen`",
    "reads hidden states beyond count in rounds": "does not read what is not real of `seen`",
    "forgets a chunk": "learns the same from a prompt in chunks",
    "reads a token ahead": "does not read tokens at and beyond `length`",
    "looks at its neighbours": "drafts for a row whatever the others are",
    "writes a committed slot": "writes only scratch of the target's cache",
    "draws from another law": "draws from the `log_q` that it reports",
    "does not add up": "reports probabilities that add up to 1",
    "counts too many": "counts 0 to 2 tokens",
    "wrong dtype": r"hands back what has the declared form. Broken: `log_q` of its draft is bfloat16\[3, 2, 29\]",
    "trains on other positions": "has one arithmetic for `log_probs` and `propose`",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_drafter_is_told_which_rule_it_breaks(tiny, fault, monkeypatch):
    subjects.compile_quickly(monkeypatch)
    with pytest.raises(ContractError, match=f"Broken breaks a rule of drafters: it {FAULTS[fault]}"):
        check_drafter(Broken(inner=testing.Self(2), fault=fault), target=tiny)


def test_a_drafter_that_is_not_a_value_is_told_so(tiny):
    class Closure(testing.Silent):
        __hash__ = None

    with pytest.raises(ContractError, match="is a frozen, hashable dataclass"):
        check_drafter(Closure(), target=tiny)


def test_any_state_passes_that_is_declared(tiny):
    """Integers of an automaton have no slots: all of them are kept, none is scratch."""

    @dataclasses.dataclass(frozen=True)
    class LastSeen(Drafter):
        """Follows each token with what last followed it."""

        num_speculative_tokens: int = 2

        def init(self, params, model, batch, capacity, dtype):
            return {
                "next": jnp.full((batch, model.vocab_size), -1, jnp.int32),
                "last": jnp.full((batch,), -1, jnp.int32),
            }

        def observe(self, params, state, seen):
            def read(state, column):
                token, real = column
                known = real & (state["last"] >= 0)
                at = jnp.where(known, state["last"], state["next"].shape[1])
                successors = state["next"].at[jnp.arange(len(token)), at].set(token, mode="drop")
                return {"next": successors, "last": jnp.where(real, token, state["last"])}, None

            real = jnp.arange(seen.tokens.shape[1])[None] < seen.count[:, None]
            return jax.lax.scan(read, state, (seen.tokens.T, real.T))[0]

        def propose(self, keys, params, state, target):
            token = jnp.take_along_axis(target.tokens, target.length[:, None] - 1, 1)[:, 0]
            first = jnp.take_along_axis(state["next"], token[:, None], 1)
            second = jnp.take_along_axis(state["next"], jnp.maximum(first, 0), 1)
            count = jnp.where(first[:, 0] < 0, 0, jnp.where(second[:, 0] < 0, 1, 2)).astype(jnp.int32)
            return Draft(jnp.concatenate([first, second], 1), None, target.cache, state, count)

    check_drafter(LastSeen(), target=tiny)


@pytest.mark.parametrize("path", sorted(DRAFTERS.glob("[!_]*.py")), ids=lambda p: p.stem)
def test_a_drafter_makes_no_randomness_of_its_own(path):
    """It draws with the keys that it is given, whose role is its own, and which verification never uses."""
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not names & {"random", "PRNGKey", "key", "default_rng"}


def test_draft_acceptance_and_further_token_have_keys_of_their_own(tiny, monkeypatch):
    model, params = tiny
    seen = {}

    class Spy(Nothing):
        def propose(self, keys, params, state, target):
            seen["draft"] = jax.random.key_data(keys)
            return super().propose(keys, params, state, target)

    uniforms, draw = sampling.uniforms, sampling.draw
    monkeypatch.setattr(
        sampling, "uniforms", lambda keys, n: (seen.update(accept=jax.random.key_data(keys)), uniforms(keys, n))[1]
    )
    monkeypatch.setattr(
        sampling, "draw", lambda keys, law: (seen.update(bonus=jax.random.key_data(keys)), draw(keys, law))[1]
    )
    state = subjects.start_rows(model, params, Nothing(), (), PROMPTS, 9)

    def keys_of_a_round(state):
        decode.decode_round(decode.Program(model, Spy()), params, (), state)
        return dict(seen)

    first = jax.jit(keys_of_a_round, compiler_options=subjects.QUICK)(state)
    second = jax.jit(keys_of_a_round, compiler_options=subjects.QUICK)(
        dataclasses.replace(state, round=state.round + 1)
    )
    found = [tuple(key) for keys in (first, second) for leaf in keys.values() for key in np.asarray(leaf).tolist()]
    assert len(found) == len(set(found)) == 2 * 3 * 3


@every_drafter
def test_the_shipped_engine_gives_the_plain_text_twice_and_hands_out_fresh_buffers(tiny, greedy_texts, name):
    """The real `jit`s, donation included: two calls with the same prompts."""
    model, params = tiny
    engine = Engine(LanguageModel.of(model, params), ALL[name])
    chosen = [greedy_texts[i] for i in (0, 5, 7)]
    for _ in range(2):
        got = engine.generate([prompt for prompt, _ in chosen], max_new_tokens=20, seed=0, capacity=CAPACITY)
        assert [g.tokens for g in got] == [text[:20] for _, text in chosen]
        assert all(g.finish == "length" for g in got)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves((engine.params, engine.drafter_params)))
