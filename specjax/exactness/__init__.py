"""The exactness lab: evidence, with error rates and power, that decoding keeps the target's law.

    from specjax.exactness import assert_exact
    assert_exact("./mine.py:Mine")
"""

from specjax.exactness.check import assert_exact, check
from specjax.exactness.oracle import Joint, NotEnumerableError, enumerate_joint
from specjax.exactness.report import Report
from specjax.exactness.sampler import Setting
from specjax.exactness.statistics import EProcess
from specjax.exactness.subjects import Subject

__all__ = [
    "EProcess", "Joint", "NotEnumerableError", "Report", "Setting", "Subject", "assert_exact", "check",
    "enumerate_joint",
]  # fmt: skip
