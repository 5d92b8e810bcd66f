"""What a notebook asks of its results and plans, one call each.

specjax.summarize(out)
specjax.account(target, drafter, batch=8, context=4096, device="h100")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
