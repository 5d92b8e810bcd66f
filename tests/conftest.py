"""Strict numerics, checked annotations, and the small subjects that tests share."""

import atexit
import os
import shutil
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # a program that two workers or commands need is compiled once
    folder = tempfile.mkdtemp(prefix="specjax-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

import jaxtyping
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning

warnings.filterwarnings("ignore", category=BeartypeDecorHintPep585DeprecationWarning)  # of flax's annotations
CHECKED = (
    "sampling", "verify", "cache", "drafter", "drafters", "engine", "generation", "language_model", "plugins", "model",
)  # fmt: skip
"""Modules whose annotations are checked at each call. Not those whose pytrees also hold shapes (`jax.eval_shape`)."""
jaxtyping.install_import_hook([f"specjax.{name}" for name in CHECKED], "typecheck.check")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

import subjects  # noqa: E402


@pytest.fixture(scope="session")
def tiny():
    """A decoder with every part, and its weights."""
    return subjects.tiny()


@pytest.fixture(scope="session")
def greedy_texts(tiny):
    """Prompts of 1 to 9 tokens, each with 33 tokens of greedy text by the plain decoder."""
    return subjects.greedy_texts(*tiny)


@pytest.fixture(scope="module")
def weights(tiny):
    """Each drafter's own weights."""
    return subjects.own_weights(*tiny)


LOGIC = {"test_contract", "test_decode", "test_greedy", "test_block", "test_trees", "test_notebook", "test_hostile"}
"""Files whose programs are many and run briefly: compiled with few optimisations, a fifth faster."""


def pytest_runtest_protocol(item):
    """Before a file's fixtures compile anything."""
    jax.config.update("jax_disable_most_optimizations", item.module.__name__ in LOGIC)


MAPS = Path("/proc/self/maps")
MOST_MAPS = 20_000
"""Each compiled program holds some memory maps, and Linux gives a process 65,530: beyond, XLA's compiler crashes."""


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Let go of compiled programs before there are too many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
