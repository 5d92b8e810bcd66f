"""What a strategy costs in memory: from shapes, and from the compilers that will run it."""

from specjax.memory.compiler import Compiled, compiled
from specjax.memory.shapes import Account, Component, account

__all__ = ["Account", "Compiled", "Component", "account", "compiled"]
