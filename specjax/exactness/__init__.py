"""The exactness lab: evidence, with error rates and power, that decoding keeps the target's law.

from specjax.exactness import assert_exact
assert_exact("./mine.py:Mine")
"""

from specjax.exactness.experiment import Setting
from specjax.exactness.lab import assert_exact, check
from specjax.exactness.large import check_large
from specjax.exactness.oracle import Joint, NotEnumerableError, enumerate_joint
from specjax.exactness.report import Report
from specjax.exactness.statistics import EProcess
from specjax.exactness.subjects import Subject

__all__ = [
    "EProcess", "Joint", "NotEnumerableError", "Report", "Setting", "Subject", "assert_exact", "check",
    "check_large",     "enumerate_joint",
]  # fmt: skip
