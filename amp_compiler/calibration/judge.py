"""Decide from the values of a metric whether it is within a tolerance of the baseline's. Pure Python.

A metric that gives one value for one model is compared directly. One that varies from run to run is measured several
times, and a set holds only if the mean is within the tolerance with 95 % confidence (Student's t, one-sided, with the
variance pooled over everything that was measured more than once).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

CONFIDENCE = 0.95
#: degrees of freedom -> the one-sided 95 % quantile of Student's t; between two rows the larger value is used
_QUANTILES = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 8: 1.860, 10: 1.812, 15: 1.753, 20: 1.725,
              30: 1.697, 60: 1.671}  # fmt: skip


def quantile(freedom: int) -> float:
    """Return the one-sided 95 % quantile of Student's t, at most a few per cent too large."""
    return next(value for known, value in reversed(_QUANTILES.items()) if known <= max(freedom, 1))


@dataclass
class Judge:
    """Compares values with those of the baseline. ``tolerance``: how much worse a value may be."""

    baseline: Sequence[float]
    tolerance: float
    maximize: bool = True
    #: what was measured several times, for the variance
    groups: list[Sequence[float]] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """The baseline's value, or the mean of several."""
        return math.fsum(self.baseline) / len(self.baseline)

    @property
    def is_noisy(self) -> bool:
        """True if the baseline's values differ."""
        return len(set(self.baseline)) > 1

    def margin(self, values: Sequence[float]) -> float:
        """Return how far the mean of ``values`` is from what is not tolerated: negative if it is worse. NaN and
        infinities are worse than anything."""
        if not all(map(math.isfinite, values)):
            return -math.inf
        mean = math.fsum(values) / len(values)
        loss = self.mean - mean if self.maximize else mean - self.mean
        rounding = 4 * sys.float_info.epsilon * max(abs(mean), abs(self.mean))
        return self.tolerance - loss + rounding

    def uncertainty(self, count: int) -> float:
        """Return the half-width of the interval around the margin of ``count`` values; 0 for a metric without noise."""
        if not self.is_noisy:
            return 0.0
        known = [g for g in (self.baseline, *self.groups) if len(g) > 1 and all(map(math.isfinite, g))]
        freedom = sum(len(g) - 1 for g in known)
        squares = sum(sum((v - math.fsum(g) / len(g)) ** 2 for v in g) for g in known)
        return quantile(freedom) * math.sqrt(squares / freedom * (1 / count + 1 / len(self.baseline)))

    def holds(self, values: Sequence[float]) -> bool:
        """Return whether the metric is within the tolerance, with 95 % confidence where it is noisy."""
        return self.margin(values) >= self.uncertainty(len(values))

    def is_decided(self, values: Sequence[float]) -> bool:
        """True if further values of the same set are not needed."""
        return abs(self.margin(values)) >= self.uncertainty(len(values))
