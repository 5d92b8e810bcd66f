"""The lab itself: verdicts, errors, error rates, rules by name, and targets that can't be enumerated."""

import json
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from scipy.stats import binom
from specjax.experiments import calibration, calibration_tables, error_rates

from specjax import cli, decode, plugins, testing, verify
from specjax.exactness import (
    EProcess,
    NotEnumerableError,
    Setting,
    assert_exact,
    check,
    check_large,
    compatibility,
    identity,
    lab,
    large,
    oracle,
    statistics,
)
from specjax.exactness.mutants import FAULTS, VERIFY_MUTANTS, conditions
from specjax.exactness.mutants.conditions import CONDITIONAL, ConditionalLiars
from specjax.exactness.subjects import instances, llama_subject
from specjax.language_model import LanguageModel

PLAIN = (Setting(1.0),)
SUBJECT, RIGHT = instances(1)[0]
QUICK = {"target": SUBJECT, "settings": PLAIN, "samples": 1 << 14, "detect": 0.2, "conditions": ()}

MINE = '''
from dataclasses import dataclass
import jax, jax.numpy as jnp
from specjax import Draft, Drafter, sampling

@dataclass(frozen=True)
class Mine(Drafter):
    """draws from a law of its own"""
    num_speculative_tokens: int = 1
    lies: bool = False

    def propose(self, keys, params, state, target):
        vocab, rows = target.model.vocab_size, target.length.shape[0]
        drawn = jnp.broadcast_to(-jnp.arange(vocab, dtype=jnp.float32), (rows, vocab))
        log_q = jax.nn.log_softmax(drawn)
        token = sampling.draw(sampling.fold(keys, 99), log_q)
        told = jnp.full_like(log_q, -jnp.log(vocab)) if self.lies else log_q
        return Draft(token[:, None], told[:, None], target.cache, state)

@dataclass(frozen=True)
class Liar(Mine):
    """reports a uniform law"""
    lies: bool = True
'''


@pytest.fixture(scope="module")
def report():
    return check(RIGHT, **QUICK)


def test_a_right_drafter_passes_and_the_report_can_be_quoted(report, tmp_path):
    assert report.passed, str(report)
    text = str(report)
    for part in ("PASS", "16,384 sequences", "0.001", "99%", "joint", "on the list of exact rules"):
        assert part in text
    data, picture = report.save(tmp_path / "report.json")
    assert json.loads(data.read_text())["verdict"] == "PASS"
    assert picture.stat().st_size > 1000


def test_too_little_power_is_inconclusive_and_says_how_many_samples_are_needed():
    report = check(RIGHT, **(QUICK | {"detect": 0.01}))
    assert report.verdict == "INCONCLUSIVE"
    assert report.needed > report.samples
    assert f"{report.needed:,} sequences would reach 0.01" in str(report)
    with pytest.raises(AssertionError, match="INCONCLUSIVE"):
        assert_exact(RIGHT, **(QUICK | {"detect": 0.01}))


def test_a_drafter_that_lies_about_q_is_caught_and_one_that_proposes_badly_passes(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    assert_exact(f"{path}:Mine", **QUICK)
    report = check(f"{path}:Liar", **QUICK)
    assert report.verdict == "FAIL"
    assert report.deviations
    assert "position 1" in report.deviations[0].where
    assert "looks like" in str(report)


LIARS = ConditionalLiars(3, *(lambda right: (right.order, right.seed))(instances(3)[0][1]))


def run_liar(name, own_noise):
    """At the default size of the conditions; the mixed batches are small."""
    subject, _ = instances(3)[0]
    seed = conditions.seed_of(name, own_noise)
    mixed = lab.Experiment(decode.Program(subject.model, LIARS), subject, drafter_seed=seed)
    small = 16
    asked = [replace(condition, share=condition.share * small) for condition in lab.CONDITIONS]
    samples = lab.SAMPLES // 2 // small
    return lab.run([mixed, *lab.under(mixed, asked)], samples, lab.ALPHA, 0.3, seed=0, later=lab.LATER_TEXTS)


@pytest.mark.parametrize("own_noise", [False, True], ids=["the round's noise", "its own noise"])
@pytest.mark.parametrize("name", [name for name in CONDITIONAL if name != conditions.HONEST])
def test_a_drafter_that_lies_under_a_condition_is_caught_there(name, own_noise):
    report = run_liar(name, own_noise)
    assert report.verdict == "FAIL"
    assert ("replay" in report.killers()) is not own_noise


def test_the_report_says_what_it_covered():
    report = run_liar(conditions.HONEST, True)
    assert report.passed, str(report)
    assert [(part.rows, part.texts) for part in report.coverage] == [
        (1024, (7, 10)), (1, (7, 10)), (4, (30, 77)), (2048, (44, 175)),
    ]  # fmt: skip
    assert all(len(part.drafted) == 4 and part.drafted[0] > 0 and part.drafted[3] > 0 for part in report.coverage)
    text = str(report)
    for part in ("one row a batch: 32,768 sequences, batches of 1, texts of 7 to 10 tokens, 0 to 3 drafts a round",
                 "temperature 1.5", "top-k 3, top-p 0.8", "top-k 3, min-p 0.15", "top-p 0.9, min-p 0.2"):  # fmt: skip
        assert part in text


def test_approximate_rules_are_measured_and_never_called_exact():
    report = check(RIGHT, rule=verify.Typical(), **QUICK)
    assert report.verdict == "APPROXIMATE"
    assert not report.passed
    assert not report.proven
    tv, kl = report.divergences[0].tv_per_token, report.divergences[0].kl_per_token
    assert 0 < tv[1] <= tv[0] <= tv[2]
    assert 0 < kl[1] <= kl[0] <= kl[2]


def test_only_the_program_s_own_rules_count_as_proven():
    class Mine(verify.Token):
        exact = True

    assert verify.is_exact(verify.Token())
    assert verify.is_exact(verify.Match())
    assert verify.is_exact(verify.Block())
    assert not any(verify.is_exact(rule) for rule in (Mine(), verify.Typical(), verify.Lenient(1.0)))
    assert compatibility.is_approximate(verify.Lenient(1.0))


GATED = ["NotStrict", "SmallEpsilonInRatio", "SlightlyLenient", "BonusFromDraft", "BlockWithBreak",
         "BlockTokenResidual", "NoBreak"]  # fmt: skip


@pytest.mark.parametrize("name", GATED)
def test_the_gate_rejects_what_no_affordable_sample_shows(name):
    assert any(result.adjusted == 0 for result in identity.check_rule(FAULTS[name][1])[1])


@pytest.mark.parametrize("rule", [verify.Token(), verify.Match(), verify.Block()], ids=str)
def test_the_gate_accepts_the_exact_rules(rule):
    differences, results = identity.check_rule(rule)
    assert differences["float64"] < 1e-12
    assert differences["float32"] < 1e-6
    assert all(result.adjusted == 1 for result in results)


@pytest.mark.parametrize("name", ["SharedUniform", "RowZeroUniform"])
def test_the_gate_does_not_speak_for_a_rule_whose_randomness_is_its_own(name):
    assert identity.check_rule(FAULTS[name][1]) == ({}, ())


RULES = '''
from dataclasses import dataclass, replace
import jax.numpy as jnp
from specjax import sampling
from specjax.verify import EXACT, Token

@dataclass(frozen=True)
class Mine(Token):
    """accepts as token does, and claims to be exact"""
    exact: bool = True

@dataclass(frozen=True)
class Plain:
    """accepts nothing"""
    biased: bool = False

    def verify(self, keys, log_p, draft, live):
        verdict = Token().decide(log_p, draft, jnp.zeros_like(live), jnp.zeros(live.shape))
        sharper = jnp.log(verdict.probs) * (1.3 if self.biased else 1.0)
        return replace(verdict, bonus=sampling.draw(sampling.fold(keys, sampling.BONUS), sharper))
'''


def test_a_rule_of_ones_own_is_tested_and_never_called_proven(tmp_path):
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    mine = assert_exact(RIGHT, rule=plugins.load_rule(f"{path}:Mine"), **QUICK)
    assert (mine.passed, mine.proven) == (True, False)
    assert mine.gate["float64"] < 1e-12
    plain = check(RIGHT, rule=plugins.load_rule(f"{path}:Plain"), **QUICK)
    assert (plain.passed, plain.proven, plain.gate) == (True, False, {})
    assert "enumeration not applicable" in str(plain)
    assert check(RIGHT, rule=plugins.load_rule(f"{path}:Plain:biased=true"), **QUICK).verdict == "FAIL"
    with pytest.raises(ValueError, match=r"defines 2 rules \(Mine, Plain\): name one"):
        plugins.load_rule(str(path))


def test_rules_are_named_with_their_fields():
    assert plugins.load_rule("lenient:lenience=0.95") == verify.Lenient(0.95)
    assert plugins.load_rule("typical:epsilon=0.2,delta=0.1") == verify.Typical(0.2, 0.1)
    assert [plugins.load_rule(name) for name in verify.RULES] == [kind() for kind in verify.RULES.values()]
    with pytest.raises(ValueError, match=r"lenience=2\.0: must be in"):
        plugins.load_rule("lenient:lenience=2")
    with pytest.raises(ValueError, match="no field 'lenience'"):
        plugins.load_rule("token:lenience=0.9")


@dataclass(frozen=True)
class Scalar(verify.Token):
    """Its bonus is one for all rows."""

    def verify(self, keys, log_p, draft, live):
        verdict = super().verify(keys, log_p, draft, live)
        return replace(verdict, bonus=verdict.bonus[0])


@pytest.mark.parametrize(
    ("rule", "message"), [(object(), "lacks verify"), (Scalar(), "verdict's bonus is")], ids=["no verify", "one bonus"]
)
def test_a_rule_that_breaks_the_interface_is_refused_by_name(rule, message):
    with pytest.raises(ValueError, match=message):
        check(RIGHT, rule=rule, **QUICK)


def test_bad_input_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="ask for at least"):
        check(RIGHT, **(QUICK | {"samples": 10}))
    with pytest.raises(ValueError, match="alpha=2"):
        check(RIGHT, alpha=2, **QUICK)
    with pytest.raises(ValueError, match="proposes point masses"):
        check("ngram", rule=verify.Lenient(0.9), **QUICK)
    with pytest.raises(ValueError, match="check_large"):
        check(RIGHT, target="smollm2-135m")
    with pytest.raises(NotEnumerableError, match="check_large"):
        oracle.check_enumerable(49152, 3)
    with pytest.raises(ValueError, match="must be one of token, match, block, typical, lenient"):
        plugins.load_rule("exactly")


def test_the_command_line_prints_the_verdict_and_returns_it(capsys, report):
    options = ["--drafter", "none", "--target", "table", "--temperature", "0", "--samples", "4096"]
    assert cli.main(["exactness", *options]) == 2
    heard = capsys.readouterr()
    assert "INCONCLUSIVE" in heard.out
    assert "nothing was drafted: this tested plain decoding, neither the drafter nor the rule" in heard.out
    assert heard.err.splitlines()[0].startswith("[  0/6656     0 s] predicted 28 s: 7 s a program compiled and ")
    assert "table V=4 seed=5, one row a batch" in heard.err
    assert cli.main(["exactness", "--drafter", "none", "--rule", "nothing"]) == 2
    assert "unknown rule" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "-1"], "--seed"),
        (["--set", "exit_layer=1"], "--set exit_layer=1: name the drafter whose field it is, with --drafter"),
        (["--output", "/no/such/folder/report.json"], "No such file or directory"),
        (["--drafter", "{file}:Raising"], "with rule token can't be tested: KeyError: 'lost'"),
    ],
)
def test_what_cannot_be_tested_is_refused_in_a_line_before_the_test(tmp_path, capsys, words, message):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom specjax import Drafter\n\n\n@dataclass(frozen=True)\n"
        "class Raising(Drafter):\n    num_speculative_tokens: int = 2\n\n"
        "    def propose(self, keys, params, state, target):\n        raise KeyError('lost')\n"
    )
    assert cli.main(["exactness", "--target", "table", *(word.format(file=file) for word in words)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]  # of progress
    assert message in said[0]
    assert len(said) == 1


def test_a_report_that_is_no_distribution_fails():
    drawn, replayed, chance, spread = 1000.0, 1000.0, 2000.0, -4000.0
    [result] = identity.replay_results([np.array([[value]]) for value in (drawn, replayed, chance, spread)])
    assert (result.adjusted, "what is reported is no distribution" in result.where) == (0, True)


def test_a_betting_test_may_be_watched_at_every_step():
    law, generator = np.full(4, 0.25), np.random.default_rng(0)
    crossed = 0
    for _ in range(300):
        bet, counts = EProcess(law), np.zeros(4)
        for _ in range(50):
            counts += generator.multinomial(20, law)
            bet.update(counts)
        crossed += bet.p_value <= 0.05
    assert crossed <= 15 + 3 * 3.8
    wrong = EProcess(law)
    wrong.update(generator.multinomial(20_000, [0.3, 0.25, 0.25, 0.2]).astype(float))
    assert wrong.p_value < 1e-3


def test_weighted_holm_equals_holm_for_equal_weights():
    assert statistics.holm([0.01, 0.04, 0.03], [1.0, 1.0, 1.0]) == pytest.approx([0.03, 0.06, 0.06])


def test_power_agrees_with_the_published_table():
    assert statistics.noncentrality(255, 1e-6) / (4 * 0.05**2) == pytest.approx(2.03e4, rel=0.01)


def test_error_rates_hold_in_a_short_calibration():
    found = error_rates.false_alarms(range(40), samples=1 << 12)
    assert all(alarms <= binom.ppf(0.9999, 40, error_rates.LEVEL) for alarms in found.values()), found
    assert error_rates.detections(range(20), samples=1 << 12)["caught"] >= 19
    assert error_rates.hardest_direction(2000, samples=1 << 12)["caught"] >= binom.ppf(1e-4, 2000, 0.99)


def test_the_tables_come_from_the_raw_results_of_the_jobs():
    done = {f"right rule: seeds {a} to {a + 49}": {"joint": 3, "sequential": 0} for a in range(0, 400, 50)}
    found = calibration_tables.rates(done)
    assert (found["joint"]["alarms"], found["joint"]["seeds"], found["joint"]["interval"]) == (24, 400, (10, 32))
    assert found["joint"]["holds"]
    assert found["sequential"]["holds"]
    assert not calibration_tables.rates({name: {"joint": 6} for name in done})["joint"]["holds"]
    assert "| joint | 400 | 24 (0.060) | 10 to 32 | yes |" in calibration_tables.markdown(done)


def test_the_study_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    calls = []
    jobs = {name: lambda name=name: calls.append(name) or {"joint": 1} for name in ("right rule: seeds 0 to 49", "x")}
    monkeypatch.setattr(calibration, "jobs", lambda seeds: jobs)
    readme = tmp_path / "README.md"
    readme.write_text(f"before {calibration_tables.BEGIN} outdated {calibration_tables.END} after")
    where = ["--output", str(tmp_path / "out"), "--readme", str(readme)]
    calibration.main([*where, "--only", "right"])
    assert "0 to 49" in capsys.readouterr().out
    calibration.main(where)
    assert calls == ["right rule: seeds 0 to 49", "x"]
    assert "| joint | 50 |" in (tmp_path / "out.md").read_text()
    assert readme.read_text().startswith("before ")
    assert "| joint | 50 |" in readme.read_text()
    assert "outdated" not in readme.read_text()
    assert readme.read_text().endswith(" after")


@dataclass(frozen=True)
class Noisy(testing.Self):
    """draws from a noisy copy of the target; a liar reports a flatter law"""

    num_speculative_tokens: int = 3
    lies: bool = False

    def init_params(self, key, model, target_params):
        table = target_params["table"]
        return {"table": table + jax.random.normal(key, table.shape)}

    def propose(self, keys, params, state, target):
        draft = super().propose(keys, params, state, target)
        return replace(draft, log_q=jax.nn.log_softmax(draft.log_q / 2)) if self.lies else draft


def large_report(drafter=Noisy(), rule=None, **changes):
    model = testing.TableModel(500, order=1)
    params = testing.table_params(np.random.default_rng(0).dirichlet(np.full(500, 0.05), 501) + 1e-6)
    options = {"setting": Setting(1.0), "sequences": 128, "new_tokens": 16, "batch": 128} | changes
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
    return check_large(drafter, LanguageModel.of(model, params), rule=rule, prompts=prompts, **options)


def test_a_large_vocabulary_is_tested_by_the_transform():
    report = large_report()
    assert report.passed, str(report)
    assert {"transform", "dependence", "two-sample"} <= {result.test for result in report.results}
    demanding = large_report(detect=0.01)
    assert demanding.verdict == "INCONCLUSIVE"
    assert demanding.needed > demanding.samples


@pytest.mark.parametrize(
    "changes",
    [{"rule": FAULTS["AlwaysAccept"][1]}, {"rule": FAULTS["RedrawFromP"][1]}, {"drafter": Noisy(lies=True)}],
    ids=["accepts", "redraws", "lies"],
)
def test_the_transform_rejects_faults_of_acceptance_of_the_residual_and_of_the_drafter(changes):
    report = large_report(**changes)
    assert report.verdict == "FAIL"
    assert "transform" in report.killers()


def test_every_mutant_has_a_name_and_a_line():
    found = VERIFY_MUTANTS
    assert len({mutant.name for mutant in found}) == len(found) == 36
    assert all(mutant.fault for mutant in found)


def test_the_tiny_llama_s_law_can_be_enumerated():
    subject = llama_subject()
    program = decode.Program(subject.model, RIGHT)
    joint = lab.Experiment(program, subject, PLAIN, new_tokens=3).joints[0]
    assert lab.Experiment(program, subject).length >= 3
    assert joint.cells.sum() == pytest.approx(1)
    assert large.SEQUENCES % large.BATCH == 0
