"""What a strategy costs in memory: from shapes, and from the compilers that will run it."""

from specjax.memory.account import Account, Component, account
from specjax.memory.compiler import Compiled, compiled
from specjax.memory.strategy import account_for

__all__ = ["Account", "Compiled", "Component", "account", "account_for", "compiled"]
