"""Drafters and rules by name, by file and from a folder, as text says them."""

from specjax.plugins.fields import Value
from specjax.plugins.loading import available, load_drafter, load_rule, settings_of, split

__all__ = ["Value", "available", "load_drafter", "load_rule", "settings_of", "split"]
