"""Exponents of power laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import fit

SIZES = [2, 4, 8, 16, 32, 48]


@given(exponent=st.floats(0.0, 3.0), factor=st.floats(1e-6, 1e6), sizes=st.sets(st.integers(1, 100), min_size=2))
def test_an_exact_law_is_found(exponent: float, factor: float, sizes: set[int]) -> None:
    found = fit(sorted(sizes), [factor * size**exponent for size in sorted(sizes)])
    assert math.isclose(found.exponent, exponent, abs_tol=1e-6)
    assert math.isclose(found.factor, factor, rel_tol=1e-4)
    assert found.constant == 0


@settings(max_examples=20)
@given(exponent=st.floats(0.5, 2.5), factor=st.floats(0.01, 100.0), share=st.floats(0.0, 20.0))
def test_a_part_that_does_not_grow_is_told_apart(exponent: float, factor: float, share: float) -> None:
    """`share`: how many times the constant is what grows at the smallest size."""
    constant = share * factor * SIZES[0] ** exponent
    values = [constant + factor * size**exponent for size in SIZES]
    found = fit(SIZES, values, constant=True)
    assert math.isclose(found.exponent, exponent, abs_tol=0.01)
    assert math.isclose(found.at(20), constant + factor * 20**exponent, rel_tol=0.01)
    assert fit(SIZES, values).exponent <= found.exponent + 0.01


def test_a_constant_is_never_negative() -> None:
    found = fit(SIZES, [size - 1 for size in SIZES], constant=True)
    assert found.constant == 0
    assert found.exponent > 1


@pytest.mark.parametrize(
    ("sizes", "values", "constant", "said"),
    [
        ([2], [1.0], False, "at least 2 sizes"),
        ([2, 2], [1.0, 1.1], False, "at least 2 sizes"),
        ([2, 4], [1.0, 2.0], True, "at least 3 sizes"),
        ([0, 4], [1.0, 2.0], False, "above 0"),
        ([2, 4], [0.0, 2.0], False, "above 0"),
    ],
)
def test_what_has_no_exponent(sizes: list[float], values: list[float], constant: bool, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit(sizes, values, constant)
