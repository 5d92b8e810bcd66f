"""For tests, a researcher's own too: small subjects with known answers, and the contract of a drafter as one call.

from specjax.testing import check_drafter
check_drafter(Mine())
"""

from specjax.testing.contract import check_drafter
from specjax.testing.differences import ContractError
from specjax.testing.drafters import Hostile, Oracle, Poison, Self, Silent, Tree
from specjax.testing.targets import TableModel, table_params, tiny_config, tiny_model

__all__ = [
    "ContractError", "Hostile", "Oracle", "Poison", "Self", "Silent", "TableModel", "Tree", "check_drafter",
    "table_params", "tiny_config", "tiny_model",
]  # fmt: skip
