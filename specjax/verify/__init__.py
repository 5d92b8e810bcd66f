"""Verification: which drafted tokens the target accepts, and the probabilities of the bonus token.

Arrays in, arrays out: nothing here knows a model. `Token` walks chains and trees, `Match`, `Typical` and
`Lenient` are variations of it, `Block` decides on a whole chain.
"""

from specjax.verify.block import Block
from specjax.verify.rule import DecisionRule, NotAChainError, Rule
from specjax.verify.walk import Lenient, Match, Token, Typical, ancestors, parents_of, walk

RULES: dict[str, type[DecisionRule]] = {
    "token": Token, "match": Match, "block": Block, "typical": Typical, "lenient": Lenient,
}  # fmt: skip
"""The rules that come with specjax, by the name that `--rule` takes."""

EXACT: frozenset[type] = frozenset({Token, Match, Block})
"""The rules that are proven to keep the target's probabilities. A rule can't declare itself exact."""


def is_exact(rule: Rule) -> bool:
    """Whether `rule` keeps the target's probabilities for every drafter that reports those it drew with."""
    return type(rule) in EXACT


__all__ = [
    "EXACT", "RULES", "Block", "DecisionRule", "Lenient", "Match", "NotAChainError", "Rule", "Token", "Typical",
    "ancestors", "is_exact", "parents_of", "walk",
]  # fmt: skip
