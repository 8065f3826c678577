"""Times: measured interleaved, shown with their spread, divided round by round."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

CONFIDENCE = 0.95
Name = TypeVar("Name", bound=Hashable)


def interleave(cases: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """Run every case `rounds` times, interleaved, each round starting with a different one.

    A case measures itself and returns seconds, so its preparation is not timed.

    >>> order = []
    >>> cases = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    >>> interleave(cases, 2), order
    ({'a': [1.0, 1.0], 'b': [1.0, 1.0]}, ['a', 'b', 'b', 'a'])
    """
    samples: dict[Name, list[float]] = {name: [] for name in cases}
    names = list(cases)
    with _collected():
        for number in range(rounds):
            first = number % len(names) if names else 0
            for name in names[first:] + names[:first]:
                gc.collect()
                samples[name].append(cases[name]())
    return samples


@contextmanager
def _collected() -> Iterator[None]:
    """Exempt all existing objects from garbage collection, so that a collection before each sample costs little."""
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def sampled(run: Callable[[], object], seconds: float = 0.2, warm: bool = False) -> Callable[[], float]:
    """Return a case for `interleave`: seconds per run, over as many runs as fill `seconds`.

    The first run may compile and is not timed; `warm`: it has run before, so there is no such run. A case that takes
    longer than `seconds` then runs once more, not three times.
    """
    if not warm:
        run()
    spent, taken = 0.0, 0.0
    for _ in range(3):
        start = time.perf_counter()
        run()
        taken = time.perf_counter() - start
        spent += taken
        if spent >= seconds:
            break
    repeats = max(1, round(seconds / max(taken, 1e-9)))

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats

    return sample


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the range of samples in seconds. As text: milliseconds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{ms(self.median)} ({ms(self.low)} to {ms(self.high)})"


def spread(samples: Sequence[float]) -> Spread:
    """Median and range.

    >>> str(spread([0.001, 0.002, 0.004]))
    '2.00 (1.00 to 4.00)'
    """
    return Spread(statistics.median(samples), min(samples), max(samples))


def ms(seconds: float) -> str:
    """Milliseconds; two decimals below ten."""
    return f"{seconds * 1e3:,.2f}" if seconds < 0.009995 else f"{seconds * 1e3:,.1f}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """One time divided by another: the median of the rounds and an interval around it.

    >>> str(Ratio(1.05, 1.02, 1.09)), str(Ratio(1.01, 0.97, 1.04)), str(Ratio(39.18, 38.1, 40.2))
    ('1.05 (1.02 to 1.09)', 'no difference (1.01: 0.97 to 1.04)', '39.2 (38.1 to 40.2)')
    >>> str(Ratio(1.52, 1.52, 1.52, rounds=1))
    '1.52 (one round)'
    """

    median: float
    low: float
    high: float
    rounds: int | None = None

    @property
    def differs(self) -> bool:
        """True if the interval does not contain 1."""
        return not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        if self.rounds == 1:
            return f"{times(self.median)} (one round)"
        between = f"{times(self.low)} to {times(self.high)}"
        middle = times(self.median)
        return f"{middle} ({between})" if self.differs else f"no difference ({middle}: {between})"


def times(value: float) -> str:
    """A factor with three figures, or with two decimals from 0.1 on."""
    if value < 0.0995:
        return f"{value:.3g}"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def ratio(own: Sequence[float], peer: Sequence[float]) -> Ratio:
    """`own` divided by `peer`, round by round.

    The middle is the median of the rounds' ratios. The interval holds the true median with a probability of at least
    95 %, whatever the distribution: it lies between two of the sorted ratios, chosen by the binomial distribution.
    Fewer than six rounds cannot give that much, and the interval is their whole range.

    >>> str(ratio([2.0, 2.2, 2.1], [1.0, 1.0, 1.0]))
    '2.10 (2.00 to 2.20)'
    """
    return Ratio(*interval([a / b for a, b in zip(own, peer, strict=True)]), len(own))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its interval; see `ratio`."""
    if not values:
        raise ValueError("no samples: a median needs at least one round")
    ordered, skipped = sorted(values), _skipped(len(values))
    return statistics.median(ordered), ordered[skipped], ordered[-1 - skipped]


def _skipped(number: int, confidence: float = CONFIDENCE) -> int:
    """Return how many of the sorted values lie outside of the median's interval, at each end.

    The k-th smallest lies above the true median if fewer than k values fall below it: a binomial tail of fair coins.
    """
    outside, skipped = 1, 0
    while 2 * (skipped + 1) < number:
        outside += math.comb(number, skipped + 1)
        if 2 * outside / 2**number > 1 - confidence:
            break
        skipped += 1
    return skipped
