"""The direction of imports: what each part may know of the others."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "specjax"
BASE = {"types", "sampling"}
ALLOWED = {
    "types": set(),
    "sampling": {"types"},
    "verify": BASE,
    "cache": {"types"},
    "model": {"types", "cache"},
    "chat_template": set(),
    "text": {"chat_template"},
    "weights": {"model", "text", "types"},
    "drafter": {*BASE, "text", "model", "cache", "weights"},
    "plugins": {"drafter", "verify", "weights"},
    "state": {"types", "verify"},
    "decode": {*BASE, "cache", "verify", "drafter", "state"},
    "generation": {"types"},
    "language_model": {"types", "model", "text", "weights", "drafter"},
    "engine": {*BASE, "decode", "verify", "drafter", "plugins", "generation", "language_model"},
    "offload": {"types", "drafter"},
}
"""Modules under specjax that a module may import; those that are not named may import anything but drafters."""


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports from specjax, as text: also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name == "specjax" or name.startswith("specjax.")}


def modules(name: str) -> list[Path]:
    folder = PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_a_module_imports_only_what_lies_below_it(name):
    for path in modules(name):
        parts = {part for full in imported(path) if len(full.split(".")) > 1 for part in [full.split(".")[1]]}
        known = {p.stem for p in PACKAGE.iterdir()}
        assert parts & known <= ALLOWED[name] | {name}, path


def test_specjax_never_imports_drafters_or_experiments():
    for path in PACKAGE.rglob("*.py"):
        names = imported(path)
        assert not {n for n in names if n.startswith(("specjax.drafters", "specjax.experiments"))}, path


@pytest.mark.parametrize("path", sorted((PACKAGE / "evaluate").rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_notebook_does_needs_no_command_line(path):
    tree = ast.walk(ast.parse(path.read_text()))
    names = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
    tree = ast.walk(ast.parse(path.read_text()))
    names |= {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)} | imported(path)
    assert not {name for name in names if name.partition(".")[0] in ("argparse", "rich")}
    assert not {name for name in names if name.startswith("specjax.cli")}


def test_drafters_never_import_each_other_nor_experiments():
    for path in (ROOT / "drafters").glob("*.py"):
        names = imported(path)
        assert not {n for n in names if n.startswith(("specjax.drafters", "specjax.experiments"))}, path


def test_a_drafter_fits_on_a_few_screens():
    for path in (ROOT / "drafters").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 130, path
