"""specjax: research on speculative decoding in JAX."""

from specjax.drafter import Drafter, Nothing
from specjax.engine import Engine, Generation
from specjax.sampling import make_sampling
from specjax.types import Draft, Target

__version__ = "0.1.0"

__all__ = ["Draft", "Drafter", "Engine", "Generation", "Nothing", "Target", "__version__", "make_sampling"]
