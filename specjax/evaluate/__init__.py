"""Strategies side by side: a comparison, what it decodes, measures and keeps, and what its records say."""

from specjax.evaluate.comparison import Comparison
from specjax.evaluate.metrics import Summary, summarize
from specjax.evaluate.result import Result
from specjax.evaluate.running import compare
from specjax.evaluate.under_load import diagnose

__all__ = ["Comparison", "Result", "Summary", "compare", "diagnose", "summarize"]
