"""Strict numerics, checked annotations, and the small subjects that tests share."""

import os
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jaxtyping
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning

warnings.filterwarnings("ignore", category=BeartypeDecorHintPep585DeprecationWarning)  # of flax's annotations
CHECKED = ("sampling", "verify", "cache", "drafter", "drafters", "engine", "model")
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
