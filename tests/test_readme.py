"""What the README says works: its commands stand there as they are, and its drafter is a drafter."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from specjax.experiments import calibration, calibration_tables

from specjax import Engine, LanguageModel, Nothing, cli, plugins, testing
from specjax.exactness import assert_exact, lab
from specjax.exactness.mutants import CONTROLS
from specjax.testing import check_drafter

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + [
    ROOT / folder / "README.md"
    for folder in ("drafters", "experiments", "specjax/evaluate", "specjax/exactness", "specjax/memory")
]


def saved(page, name, folder):
    """The drafter that a page shows whole, as a reader would save it."""
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [source] = [code for code in blocks if f"class {name}(Drafter)" in code]
    assert source.count("\n") <= 80
    path = folder / f"{name.lower()}.py"
    path.write_text(source)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The drafter of the README."""
    return saved(README, "Bigram", tmp_path_factory.mktemp("readme"))


def test_the_readme_is_a_page():
    assert README.count("\n") <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere_and_every_command_exists(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for command in re.findall(r"^(?:\$ )?specjax (\w+)", text, re.MULTILINE):
        assert command in cli.COMMANDS, command
    for module in re.findall(r"python -m specjax\.experiments\.(\w+)", text):
        assert (ROOT / "experiments" / f"{module}.py").exists(), module


def test_each_kind_of_fault_has_a_test_that_exists():
    rows = [row for row in (ROOT / "tests" / "README.md").read_text().splitlines() if row.startswith("| ")][1:]
    assert len(rows) == 24
    for row in rows:
        assert "`test_" in row or "not offered" in row, row
        for part in re.split(r" [·|] ", row):
            for name in re.findall(r"`(test_\w+)`", part):
                file = re.search(r"(\w+): `", part).group(1)
                assert f"def {name}(" in (ROOT / "tests" / f"test_{file}.py").read_text(), (file, name)


def test_the_head_that_the_drafters_readme_shows_keeps_the_contract_and_the_targets_distribution(tmp_path):
    path = saved((ROOT / "drafters" / "README.md").read_text(), "Head", tmp_path)
    head = plugins.load_drafter(f"{path}:Head:num_speculative_tokens=2")
    check_drafter(head)
    assert assert_exact(head, samples=1 << 15, detect=0.2, conditions=()).passed


def test_the_two_commands_stand_in_the_first_screen():
    first = README[:2000]
    assert "python -m pip install -e .        && specjax compare       # main job\n" in first
    assert "python -m pip install -e '.[test]' && python -m pytest     # tests\n" in first


def test_the_table_of_a_real_run_stands_there():
    for line in ("acceptance length, pooled", "HBM added by weights", "greedy output equals none's"):
        assert re.search(rf"^ ?{line} .*\d|^ ?{line} .*yes", README, re.MULTILINE), line


def test_its_tables_of_the_exactness_lab_are_those_of_the_committed_study():
    done = calibration.results(calibration.open_store())
    readme = (ROOT / "specjax" / "exactness" / "README.md").read_text()
    assert calibration_tables.into_readme(readme, done) == readme
    assert all(row["holds"] for row in calibration_tables.rates(done).values())
    rows = {row["name"]: row for name, part in done.items() if name.startswith("mutants: ") for row in part}
    right = {mutant.name for mutant in CONTROLS}
    assert {name for name, row in rows.items() if min(row["p_values"].values()) > lab.ALPHA} == right
    assert all(row["verdict"] == "PASS" for name, row in done.items() if name.startswith("drafter: "))


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
