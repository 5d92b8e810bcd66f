"""specjax: research on speculative decoding in JAX.

target = specjax.load_target("smollm2-135m")
drafter = specjax.load_drafter("ngram", num_speculative_tokens=7)
out = specjax.Engine(target, drafter).generate(["Why is the sky blue?"], max_new_tokens=64, seed=0)

Names are imported when they are first used: `import specjax` waits for nothing.
"""

# ruff: noqa: F401 (what `__all__` names is computed below)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers: the same names as in `_MODULES`
    from specjax import testing
    from specjax.drafter import Drafter, Nothing
    from specjax.engine import Engine, Generation, Generations
    from specjax.evaluate import Comparison, compare, summarize
    from specjax.exactness import assert_exact
    from specjax.language_model import LanguageModel, load_target
    from specjax.memory import account_for as account
    from specjax.plugins import load_drafter, load_rule
    from specjax.sampling import make_sampling
    from specjax.types import Draft, Target

__version__ = "0.1.0"

_MODULES = {
    "specjax.drafter": ("Drafter", "Nothing"),
    "specjax.engine": ("Engine", "Generation", "Generations"),
    "specjax.exactness": ("assert_exact",),
    "specjax.language_model": ("LanguageModel", "load_target"),
    "specjax.evaluate": ("Comparison", "compare", "summarize"),
    "specjax.plugins": ("load_drafter", "load_rule"),
    "specjax.sampling": ("make_sampling",),
    "specjax.types": ("Draft", "Target"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__", "account", "testing"])


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("specjax.testing")
    if name == "account":  # the package calls it by what it is for: its own `account` takes a program
        return importlib.import_module("specjax.memory").account_for
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
