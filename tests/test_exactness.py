"""The production round keeps the target's law: exact joint laws against samples of the whole loop."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.experiments import calibration, error_rates

from specjax import decode, plugins, verify
from specjax.exactness import gate, identity, lab
from specjax.exactness.experiment import Setting
from specjax.exactness.mutants import CONTROLS, FAULTS, VERIFY_MUTANTS, score
from specjax.exactness.subjects import dirichlet_laws, instances, llama_subject

F3 = np.array([0.1, 0.6, 0.3]), np.array([0.5, 0.3, 0.2])
F4 = np.array([0.6, 0.2, 0.1, 0.1]), np.array([0.7, 0.2, 0.05, 0.05])


def one_step(p, proposal, rule=None):
    law, accepted = gate.law_of(rule or verify.Token(), lambda context: p, proposal, len(p))
    return law.sum(tuple(range(1, law.ndim))), accepted


def chain(q, **options):
    return gate.chain(1, lambda context: q, **options)


@pytest.mark.parametrize(("p", "q", "acceptance"), [(*F3, 0.6), (*F4, 0.9)])
def test_one_step_emits_the_target_s_law_at_the_optimal_rate(p, q, acceptance):
    law, accepted = one_step(p, chain(q))
    np.testing.assert_allclose(law, p, atol=1e-12)
    assert accepted == pytest.approx(acceptance)


@pytest.mark.parametrize(("p", "q", "acceptance"), [(*F3, 0.29), (*F4, 0.47)])
def test_match_keeps_the_law_and_accepts_less(p, q, acceptance):
    law, accepted = one_step(p, chain(q), verify.Match())
    np.testing.assert_allclose(law, p, atol=1e-12)
    assert accepted == pytest.approx(acceptance)


@pytest.mark.parametrize(("p", "q", "wrong"), [(*F3, [0.05, 0.7125, 0.2375]), (*F4, [0.42, 0.04, 0.27, 0.27])])
def test_match_is_biased_only_if_a_mismatch_draws_from_the_residual(p, q, wrong):
    law, _ = one_step(p, chain(q), FAULTS["OneHotResidualOfQ"][1])
    np.testing.assert_allclose(law, wrong, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "f3", "f4"),
    [
        ("RedrawFromP", [0.14, 0.54, 0.32], [0.66, 0.22, 0.06, 0.06]),
        ("SoftmaxResidual", [0.216, 0.456, 0.328], [0.624, 0.224, 0.076, 0.076]),
        ("AlwaysAccept", [0.5, 0.3, 0.2], [0.7, 0.2, 0.05, 0.05]),
        ("NoUniform", [0.0, 0.675, 0.325], [0.0, 0.2, 0.4, 0.4]),
    ],
)
def test_faulty_rules_have_their_known_wrong_laws(name, f3, f4):
    _, rule = FAULTS[name]
    np.testing.assert_allclose(one_step(F3[0], chain(F3[1]), rule)[0], f3, atol=1e-3)
    np.testing.assert_allclose(one_step(F4[0], chain(F4[1]), rule)[0], f4, atol=1e-3)


def test_point_masses_are_exact_for_any_proposer():
    p, q = F3
    for drawn, acceptance in ((q, 0.29), (np.array([1.0, 0, 0]), 0.1)):
        law, accepted = one_step(p, chain(drawn, certain=True))
        np.testing.assert_allclose(law, p, atol=1e-12)
        assert accepted == pytest.approx(acceptance)


def test_argmax_drafts_with_a_softmax_q_give_the_published_wrong_law():
    law, _ = one_step(F3[0], chain(np.array([1.0, 0, 0]), reported=lambda context: F3[1]))
    np.testing.assert_allclose(law, [0.2, 0.6, 0.2], atol=1e-12)


def test_one_sided_top_k_gives_its_known_laws():
    p, raw, kept = np.array([2, 5, 0, 0]) / 7, np.array([0.4, 0.3, 0.2, 0.1]), np.array([4, 3, 0, 0]) / 7
    for drawn, acceptance in ((kept, 5 / 7), (raw, 0.2857 + 0.3)):
        law, accepted = one_step(p, chain(drawn))
        np.testing.assert_allclose(law, p, atol=1e-12)
        assert accepted == pytest.approx(acceptance, abs=1e-4)
    law, _ = one_step(p, chain(kept, reported=lambda context: raw))
    np.testing.assert_allclose(law, [0.408, 0.592, 0, 0], atol=1e-3)


def without(q):
    def law(above, elder):
        rest = np.where(np.isin(np.arange(len(q)), elder), 0, q)
        return rest / rest.sum()

    return law


@pytest.mark.parametrize("p", [F3[0], F4[0]])
def test_siblings_keep_the_law_with_and_without_replacement(p):
    q = F3[1] if len(p) == 3 else F4[1]
    for law in (lambda above, elder: q, without(q)):
        found, _ = one_step(p, gate.Proposal((-1, -1), law))
        np.testing.assert_allclose(found, p, atol=1e-12)


def test_siblings_without_replacement_need_the_conditional_q():
    found, _ = one_step(F3[0], gate.Proposal((-1, -1), without(F3[1]), lambda above, elder: F3[1]))
    np.testing.assert_allclose(found, [0.1, 0.54, 0.36], atol=1e-9)


def test_deterministic_siblings_are_zeroed_and_renormalised():
    order = np.eye(3)[[0, 2]]
    proposal = gate.Proposal((-1, -1), lambda above, elder: order[len(elder)], certain=True)
    np.testing.assert_allclose(one_step(F3[0], proposal)[0], F3[0], atol=1e-12)


GRID = [(2, 1), (2, 3), (3, 2), (3, 3), (4, 1), (4, 3)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_walk_s_joint_law_is_the_target_s_over_the_whole_grid(dtype):
    for vocab, length in GRID:
        target, draft = dirichlet_laws(vocab, length + 1, seed=vocab)
        proposal = gate.chain(length, draft.__getitem__)
        difference = identity.difference(verify.Token(), proposal, target.__getitem__, dtype)
        assert max(difference) < gate.TOLERANCE[dtype], (vocab, length)


def test_trees_keep_the_joint_law():
    target, draft = dirichlet_laws(2, 4, seed=3)
    proposal = gate.Proposal((-1, -1, 0, 0, 1), lambda above, elder: draft[above])
    assert max(identity.difference(verify.Token(), proposal, target.__getitem__, "float64")) < 1e-12


def test_bf16_draws_and_lenience_099_fail_the_gate():
    target, draft = dirichlet_laws(3, 3, seed=7)
    rounded = {c: np.exp(np.asarray(jax.numpy.asarray(np.log(q), "bfloat16"), np.float64)) for c, q in draft.items()}
    drawn = {context: q / q.sum() for context, q in rounded.items()}
    proposal = gate.chain(2, drawn.__getitem__, reported=draft.__getitem__)
    assert identity.difference(verify.Token(), proposal, target.__getitem__, "float64")[0] > 1e-5
    proposal = gate.chain(2, draft.__getitem__)
    assert identity.difference(verify.Lenient(0.99), proposal, target.__getitem__, "float64")[0] > 1e-4


@dataclass(frozen=True)
class RareRedraw(verify.Token):
    """Redraws from p where the residual's mass is small."""

    def residual(self, probs, q):
        left = super().residual(probs, q)
        return jnp.where(left.sum(-1, keepdims=True) < 1e-3, probs, left)


@dataclass(frozen=True)
class OverlapOfP(verify.Token):
    """Counts min(p, q) of every sibling, where the younger one's is min(r, q)."""

    def decide(self, log_p, draft, live, u):
        verdict = super().decide(log_p, draft, live, u)
        if draft.parents is None:
            return verdict
        each = jnp.minimum(jnp.exp(log_p[:, :1]), jnp.exp(draft.log_q)).sum(-1)
        tested = jnp.arange(each.shape[1], dtype=jnp.int32)[None] < verdict.tested[:, None]
        return replace(verdict, overlap=jnp.where(tested, each, 0).sum(1))


@pytest.mark.parametrize("rule", [RareRedraw(), OverlapOfP()], ids=str)
def test_faults_that_no_sample_shows_fail_the_gate(rule):
    failed = [result.where for result in identity.check_rule(rule)[1] if result.adjusted == 0]
    assert failed
    assert all(("overlap" in where) is isinstance(rule, OverlapOfP) for where in failed)


SHORT_GRID = {  # fields, and (vocabulary, tokens that are enumerated)
    "ngram": ({"num_speculative_tokens": "7"}, (2, 9)),
    "early-exit": ({"num_speculative_tokens": "3", "exit_layer": "1"}, (6, 4)),
    "external": ({"num_speculative_tokens": "1", "keep_layers": "1"}, (6, 3)),
    "fp8": ({"num_speculative_tokens": "3", "kv": "own"}, (6, 4)),
}


@pytest.mark.parametrize("name", SHORT_GRID)
def test_every_drafter_has_the_enumerated_law_in_mixed_batches_of_ragged_prompts(name):
    fields, (vocab, new_tokens) = SHORT_GRID[name]
    subject = llama_subject(vocab)
    program = decode.Program(subject.model, plugins.load_drafter(name, fields))
    experiment = lab.Experiment(program, subject, calibration.SETTINGS, new_tokens=new_tokens)
    report = lab.run([experiment], 1 << 15, alpha=1e-3, detect=0.3, seed=0)
    assert report.passed, str(report)


TWO = (Setting(1.0, weight=3), Setting(0.7, top_p=0.8))
RIGHT = [mutant.name for mutant in CONTROLS]
WRONG = ["RedrawFromP", "SoftmaxResidual", "AbsoluteResidual", "NoUniform", "OneHotResidualOfQ", "SharedUniform",
         "AcceptanceNoiseReused", "DraftNoiseReused", "DraftUniformReused",
         "BonusFromResidual", "BonusFromDraft", "BonusFromPreviousRow", "ResidualNextRow", "RowOfPOff",
         "RowOfQOff", "ResidualNotNormalised", "BlockWithBreak"]  # fmt: skip


@pytest.fixture(scope="module")
def panel():
    chosen = [mutant for mutant in CONTROLS + VERIFY_MUTANTS if mutant.name in {*RIGHT, *WRONG}]
    options = {"pairs": instances(3), "settings": TWO, "samples": 1 << 14, "with_gate": False}
    return {row.name: row for row in score.panel(chosen, **options)}


def test_the_lab_rejects_mutants_and_no_exact_rule(panel):
    assert [name for name in WRONG if not panel[name].killed_by] == []
    assert {name: panel[name].killed_by for name in RIGHT} == dict.fromkeys(RIGHT, ())


@pytest.mark.parametrize("name", ["StaleCache", "late_end"])
def test_the_lab_rejects_faults_outside_of_verification(name):
    assert score.others(settings=TWO, samples=1 << 14, names=[name])[0].killed_by


def test_the_lab_rejects_every_drafter_that_lies():
    rows = score.liars(pairs=instances(3), settings=TWO, samples=1 << 15)
    assert [row.name for row in rows if not row.killed_by] == []


def test_accepted_drafts_agree_with_their_closed_form(panel):
    theory = error_rates.accepted_in_theory(*dirichlet_laws(3, 4, seed=7), drafts=3)
    assert theory["block"] > theory["token"] > theory["match"]
    for name in RIGHT:
        row, expected = panel[name], theory.get(name, theory["block"])
        assert abs(row.accepted_per_round - expected) < 5 * row.accepted_error, name
    flat = {(): np.array([1, 2]) / 3, (0,): np.array([1, 2]) / 3, (1,): np.array([1, 2]) / 3}
    turned = {context: law[::-1] for context, law in flat.items()}
    toy = error_rates.accepted_in_theory(flat, turned, drafts=2)
    assert (toy["token"], toy["block"]) == pytest.approx((10 / 9, 11 / 9))  # Sun et al. 2024, figure 1


def test_the_joint_test_sees_a_shared_uniform(panel):
    assert "joint" in panel["SharedUniform"].killed_by
