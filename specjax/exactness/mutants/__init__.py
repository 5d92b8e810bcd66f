"""What the lab must be able to see: rules, drafters, caches and loops with one fault each, and its score on them.

Nothing here is for use. Each mutant goes through the production round with one part replaced.
"""

from specjax.exactness.mutants.panel import BLOCK_MUTANTS, CONTROLS, VERIFY_MUTANTS, Mutant, Panel
from specjax.exactness.mutants.rules import FAULTS

__all__ = ["BLOCK_MUTANTS", "CONTROLS", "FAULTS", "VERIFY_MUTANTS", "Mutant", "Panel"]
