"""How a figure grows with size: the exponent of a power law."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Growth:
    """value = constant + factor · size^exponent"""

    exponent: float
    factor: float
    constant: float = 0.0

    def at(self, size: float) -> float:
        return float(self.constant + self.factor * size**self.exponent)


def fit(sizes: Sequence[float], values: Sequence[float], constant: bool = False) -> Growth:
    """Fit a power law to the values; an exponent of 1 is linear growth.

    `constant`: with a non-negative part that does not grow. Without it, such a part makes the exponent look smaller
    than it is. It needs at least three sizes, otherwise two are enough. Distances are relative: a large value weighs as
    much as a small one.

    >>> fit([2, 4, 8], [6, 12, 24]).exponent
    1.0
    >>> plain, apart = fit([2, 4, 8, 16], [102, 104, 108, 116]), fit([2, 4, 8, 16], [102, 104, 108, 116], constant=True)
    >>> round(plain.exponent, 2), round(apart.exponent, 2), round(apart.constant)
    (0.06, 1.0, 100)
    """
    pairs = list(zip(sizes, values, strict=True))
    if len({size for size, _ in pairs}) < (3 if constant else 2):
        raise ValueError(f"an exponent needs at least {3 if constant else 2} sizes, not {list(sizes)}")
    if any(size <= 0 or value <= 0 for size, value in pairs):
        raise ValueError("an exponent needs sizes and values above 0")
    return _with_constant(pairs) if constant else _straight(pairs)


def _straight(pairs: Sequence[tuple[float, float]]) -> Growth:
    """Fit a line through the logarithms."""
    points = [(math.log(size), math.log(value)) for size, value in pairs]
    x_mean = math.fsum(x for x, _ in points) / len(points)
    y_mean = math.fsum(y for _, y in points) / len(points)
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in points) / math.fsum((x - x_mean) ** 2 for x, _ in points)
    return Growth(round(slope, 12), math.exp(y_mean - slope * x_mean))


def _with_constant(pairs: Sequence[tuple[float, float]]) -> Growth:
    """Search for the exponent; for each one, the best constant and factor are a linear problem."""
    largest = max(size for size, _ in pairs)

    def solve(exponent: float) -> tuple[float, Growth]:
        # Divided by the value: (1/v) · constant + (s^k/v) · factor = 1.
        rows = [(1 / value, (size / largest) ** exponent / value) for size, value in pairs]
        aa, ab, bb = (math.fsum(f(*row) for row in rows) for f in (_aa, _ab, _bb))
        a, b = math.fsum(row[0] for row in rows), math.fsum(row[1] for row in rows)
        determinant = aa * bb - ab * ab
        free, factor = (0.0, b / bb)
        if determinant > 1e-15 * aa * bb:
            free, factor = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if free < 0:
            free, factor = 0.0, b / bb
        error = math.fsum((row[0] * free + row[1] * factor - 1) ** 2 for row in rows)
        return error, Growth(exponent, factor / largest**exponent, free)

    coarse = min((number / 50 for number in range(1, 251)), key=lambda exponent: solve(exponent)[0])
    exponent = _lowest(lambda exponent: solve(exponent)[0], max(1e-3, coarse - 0.02), coarse + 0.02)
    return solve(exponent)[1]


def _aa(a: float, b: float) -> float:
    return a * a


def _ab(a: float, b: float) -> float:
    return a * b


def _bb(a: float, b: float) -> float:
    return b * b


def _lowest(of: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a function that has only one."""
    while high - low > 1e-9:
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if of(left) < of(right):
            high = right
        else:
            low = left
    return (low + high) / 2
