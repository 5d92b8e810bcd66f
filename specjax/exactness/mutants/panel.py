"""All mutants of verification by name, and the rule that runs many of them in one program."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax import verify
from specjax.exactness.mutants.blocks import Hierarchical
from specjax.exactness.mutants.rules import FAULTS
from specjax.types import Cache, Draft, Keys, Verdict


@dataclass(frozen=True)
class Mutant:
    """A rule, and what it does in one line."""

    name: str
    fault: str
    rule: verify.Rule


CONTROLS = [
    Mutant("token", "the production rule", verify.Token()),
    Mutant("match", "sample from the target, accept while equal", verify.Match()),
    Mutant("block", "block verification", verify.Block()),
    Mutant("hierarchical", "hierarchical verification as specified", Hierarchical()),
]
"""Right, though some are unusual: they must pass."""

VERIFY_MUTANTS = [Mutant(name, *what) for name, what in FAULTS.items()]
BLOCK_MUTANTS = VERIFY_MUTANTS[-3:]


@dataclass(frozen=True)
class Panel:
    """A rule that gives each mutant an equal block of rows, in order: one compilation for all. Drafts are chains."""

    mutants: tuple[Mutant, ...]

    def verify(self, keys: Keys, log_p: Array, draft: Draft, live: Array) -> Verdict:
        """Verify each block with its own mutant."""
        rows = live.shape[0] // len(self.mutants)
        results = []
        for number, mutant in enumerate(self.mutants):
            block = slice(number * rows, (number + 1) * rows)
            log_q = None if draft.log_q is None else draft.log_q[block]
            own = Draft(draft.tokens[block], log_q, Cache(()), ())
            results.append(mutant.rule.verify(keys[block], log_p[block], own, live[block]))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts).astype(parts[0].dtype), *results)
