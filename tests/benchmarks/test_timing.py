"""Samples taken in turns, and ratios with an interval that can be trusted."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import Ratio, interleave, interval, ratio, sampled, spread

SAMPLES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30)


@pytest.fixture(scope="module", autouse=True)
def no_collections() -> Iterator[None]:
    """A collection before every sample takes a tenth of a second here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("collect", "freeze", "unfreeze", "get_freeze_count"):
            patch.setattr(gc, name, lambda: 0)
        yield


@given(cases=st.integers(1, 6), rounds=st.integers(1, 8))
def test_every_case_runs_once_a_round_and_starts_one_in_turn(cases: int, rounds: int) -> None:
    order: list[int] = []
    found = interleave({str(n): lambda n=n: order.append(n) or 1.0 for n in range(cases)}, rounds)
    turns = [order[i : i + cases] for i in range(0, len(order), cases)]
    assert [len(samples) for samples in found.values()] == [rounds] * cases
    assert all(sorted(turn) == list(range(cases)) for turn in turns)
    assert [turn[0] for turn in turns] == [number % cases for number in range(rounds)]


def test_nothing_to_run_gives_nothing() -> None:
    assert interleave({}, 3) == {}


def test_a_slow_run_is_not_repeated() -> None:
    runs: list[int] = []
    sample = sampled(lambda: runs.append(1), seconds=0.0)  # any run takes longer than that
    assert len(runs) == 2
    sample()
    assert len(runs) == 3
    sampled(lambda: runs.append(1), seconds=0.0, warm=True)
    assert len(runs) == 4


def coverage(number: int, skipped: int) -> float:
    """How often fair coins put the true median between the values that are left, by trying all of them."""
    inside = 0
    for coins in itertools.product((0, 1), repeat=number):
        below = sum(coins)  # values under the true median
        inside += skipped < below < number - skipped
    return inside / 2**number


@pytest.mark.parametrize("number", range(1, 15))
def test_the_interval_is_the_narrowest_that_holds_the_median_95_times_in_100(number: int) -> None:
    values = list(range(number))
    _, low, high = interval(values)
    skipped = low
    assert high == number - 1 - skipped
    if number < 6:
        assert skipped == 0
    else:
        assert coverage(number, skipped) >= 0.95
        assert coverage(number, skipped + 1) < 0.95


def test_many_samples_do_not_overflow() -> None:
    _, low, high = interval(list(range(2000)))
    assert 950 < low < 1000 < high < 1050


@given(own=SAMPLES, data=st.data())
def test_a_ratio_is_of_pairs_and_turns_around(own: list[float], data: st.DataObject) -> None:
    peer = data.draw(st.lists(st.floats(0.1, 10.0), min_size=len(own), max_size=len(own)))
    found, turned = ratio(own, peer), ratio(peer, own)
    assert found.low <= found.median <= found.high
    assert found.median == statistics.median(a / b for a, b in zip(own, peer, strict=True))
    assert math.isclose(found.low, 1 / turned.high, rel_tol=1e-9)
    assert math.isclose(found.high, 1 / turned.low, rel_tol=1e-9)


@given(samples=SAMPLES, factor=st.floats(1.5, 50.0))
def test_a_factor_is_found_whatever_the_noise_that_both_share(samples: list[float], factor: float) -> None:
    found = ratio([factor * sample for sample in samples], samples)
    assert math.isclose(found.median, factor, rel_tol=1e-9)
    assert found.differs
    alone = len(samples) == 1
    assert str(ratio(samples, samples)) == ("1.00 (one round)" if alone else "no difference (1.00: 1.00 to 1.00)")


def test_samples_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="at least one"):
        ratio([], [])


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Ratio(1.05, 1.02, 1.09), "1.05 (1.02 to 1.09)"),
        (Ratio(1.01, 0.97, 1.04), "no difference (1.01: 0.97 to 1.04)"),
        (Ratio(1.0, 1.0, 1.2), "no difference (1.00: 1.00 to 1.20)"),
        (Ratio(39.18, 38.1, 140.4), "39.2 (38.1 to 140)"),
        (Ratio(0.0342, 0.031, 0.1), "0.0342 (0.031 to 0.10)"),
    ],
)
def test_ratios_as_text(found: Ratio, text: str) -> None:
    assert str(found) == text


def test_a_spread_as_text() -> None:
    assert str(spread([0.0010, 0.0025, 1.5])) == "2.50 (1.00 to 1,500.0)"
