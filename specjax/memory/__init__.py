"""What a strategy costs in memory: from shapes, and from the compilers that will run it."""

from specjax.memory.account import Account, Component, account
from specjax.memory.compiler import Compiled, compiled

__all__ = ["Account", "Compiled", "Component", "account", "compiled"]
