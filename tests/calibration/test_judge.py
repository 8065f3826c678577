"""``Judge``: whether a metric is within the tolerance, with and without noise."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_compiler.calibration.bisect import find_largest
from amp_compiler.calibration.judge import Judge, quantile


@pytest.mark.parametrize(("value", "maximize", "holds"), [
    (0.97, True, True), (0.9699, True, False), (1.5, True, True),
    (0.99, False, True), (0.9901, False, False), (-3.0, False, True),
    (math.nan, True, False), (math.inf, True, False), (-math.inf, False, False),
])  # fmt: skip
def test_one_value(value, maximize, holds):
    judge = Judge([0.98, 0.98], 0.01, maximize)
    assert judge.holds([value]) is holds
    assert judge.is_decided([value])
    assert not judge.is_noisy


@given(st.floats(-1e6, 1e6), st.floats(0, 1e3))
def test_a_value_at_the_bound_holds_whatever_the_rounding(baseline, tolerance):
    assert Judge([baseline], tolerance).holds([baseline - tolerance])
    assert Judge([baseline], tolerance, maximize=False).holds([baseline + tolerance])


def test_a_noisy_value_needs_a_margin():
    judge = Judge([0.98, 0.97, 0.99, 0.98, 0.98], 0.1)
    assert judge.is_noisy
    assert judge.holds([0.98])
    assert not judge.holds([0.882]), "within the tolerance, but not with confidence"
    assert not judge.is_decided([0.882])
    assert judge.uncertainty(5) < judge.uncertainty(1)


def test_quantiles_fall():
    values = [quantile(n) for n in range(1, 100)]
    assert values == sorted(values, reverse=True)
    assert values[-1] > 1.645


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(170, 199), min_size=1, max_size=5), st.integers(0, 2**32))
def test_a_noisy_search_finds_the_faults(faults, seed):
    """Each fault costs ten times the noise: the search finds them all, and at most two ops too many."""
    noise = random.Random(seed)
    judge = Judge([0.9 + noise.gauss(0, 0.005) for _ in range(5)], 0.03)

    def holds(low):
        values = []
        while len(values) < 5:
            values.append(0.9 - 0.05 * len(low & faults) + noise.gauss(0, 0.005))
            if judge.is_decided(values):
                break
        if len(values) > 1:
            judge.groups.append(values)
        return judge.holds(values)

    found = find_largest(range(200), holds)
    out = {*found.blamed, *found.unknown}
    assert faults <= out
    assert len(out) <= len(faults) + 2
