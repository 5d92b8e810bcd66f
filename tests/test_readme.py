"""What the README says works: its commands stand there as they are, and its drafter is a drafter."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from specjax.experiments import calibration, calibration_tables

from specjax import Engine, LanguageModel, Nothing, cli, plugins, testing
from specjax.exactness import lab
from specjax.exactness.mutants import CONTROLS

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The drafter of the README, as a reader would save it."""
    [source] = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Bigram" in code]
    assert source.count("\n") <= 60
    path = tmp_path_factory.mktemp("readme") / "bigram.py"
    path.write_text(source)
    return path


def test_the_two_commands_stand_in_the_first_screen():
    first = README[:2000]
    assert "python -m pip install -e .        && specjax compare       # main job\n" in first
    assert "python -m pip install -e '.[test]' && python -m pytest     # tests\n" in first


def test_the_table_of_a_real_run_stands_there():
    for line in ("acceptance length, pooled", "HBM added by weights", "greedy output equals none's"):
        assert re.search(rf"^ ?{line} .*\d|^ ?{line} .*yes", README, re.MULTILINE), line


def test_its_tables_of_the_exactness_lab_are_those_of_the_committed_study():
    done = calibration.results(calibration.open_store())
    readme = (Path(__file__).parents[1] / "specjax" / "exactness" / "README.md").read_text()
    assert calibration_tables.into_readme(readme, done) == readme
    assert all(row["holds"] for row in calibration_tables.rates(done).values())
    rows = {row["name"]: row for name, part in done.items() if name.startswith("mutants: ") for row in part}
    right = {mutant.name for mutant in CONTROLS}
    assert {name for name, row in rows.items() if min(row["p_values"].values()) > lab.ALPHA} == right
    assert all(row["verdict"] == "PASS" for name, row in done.items() if name.startswith("drafter: "))


def test_every_command_in_the_readme_exists():
    for command in re.findall(r"^(?:\$ )?specjax (\w+)", README, re.MULTILINE):
        assert command in cli.COMMANDS


def test_the_readmes_drafter_is_exact_greedy_and_draws_from_what_it_reports(file):
    model = testing.TableModel(7, order=1)
    params = testing.table_params(np.random.default_rng(0).dirichlet(np.full(7, 0.3), 8))
    mine = plugins.load_drafter(f"{file}:Bigram", {"num_speculative_tokens": "2"})
    prompts = [[1, 2, 3, 1, 2], [4]]
    greedy, plain = (
        Engine(LanguageModel.of(model, params), kind).generate(prompts, max_new_tokens=24, seed=0)
        for kind in (mine, Nothing())
    )
    assert [row.tokens for row in greedy] == [row.tokens for row in plain]
    assert sum(int(row.counts.accepted.sum()) for row in greedy) > 10
    sampled = Engine(LanguageModel.of(model, params), mine).generate(
        prompts, max_new_tokens=24, seed=0, temperature=1.0
    )
    tested, overlap = (sum(float(getattr(row.counts, name).sum()) for row in sampled) for name in ("tested", "overlap"))
    assert 0 < overlap < tested
    assert jnp.all(jnp.asarray(sampled[0].counts.drafted) <= 2)
