"""Strategies side by side: a comparison, what it decodes, measures and keeps, and what its records say.

result = compare(Comparison("smollm2-135m", ["ngram", "fp8:kv=own"], limit=7), "runs/mine")
result.rows[1]["acceptance_length"], summarize(result.records), diagnose(result.folder)
"""

from specjax.evaluate.comparison import Comparison
from specjax.evaluate.metrics import Summary, summarize
from specjax.evaluate.result import Result
from specjax.evaluate.running import compare
from specjax.evaluate.under_load import diagnose

__all__ = ["Comparison", "Result", "Summary", "compare", "diagnose", "summarize"]
