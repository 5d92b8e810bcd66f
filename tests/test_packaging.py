"""The package as it is installed."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_drafters_refuse_to_be_imported_under_a_name_that_is_not_theirs():
    spec = importlib.util.spec_from_file_location("drafters", ROOT / "drafters" / "__init__.py")
    with pytest.raises(ImportError, match=r"import specjax\.drafters, not drafters"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_every_package_of_the_source_tree_is_packaged():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "specjax").rglob("__init__.py")}
    assert found | {"specjax.drafters", "specjax.experiments"} == set(settings["packages"])


def test_the_version_is_stated_once():
    import specjax

    assert specjax.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
