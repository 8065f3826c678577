"""``find_largest``: what it finds, and in how many evaluations."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_compiler.calibration.bisect import Exhausted, Found, find_largest

COUNT = 200


class Counting:
    """A predicate that counts how often it is asked, and refuses to be asked twice for one set."""

    def __init__(self, rule, budget: int = 10**6) -> None:
        self.rule, self.budget, self.asked = rule, budget, {}

    def __call__(self, low: frozenset) -> bool:
        if len(self.asked) >= self.budget:
            raise Exhausted
        assert low not in self.asked, "asked twice"
        self.asked[low] = self.rule(low)
        return self.asked[low]


def check(found: Found, asked: Counting, items) -> None:
    """What holds of every result: it was evaluated itself, and the three parts are the items."""
    assert not found.holds or asked.asked[frozenset(found.holds)]
    assert sorted([*found.holds, *found.blamed, *found.unknown]) == sorted(items)


def without(faults):
    return lambda low: not low & set(faults)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(0, 5))
def test_a_good_order_finds_the_faults_in_few_evaluations(faults, guess):
    asked = Counting(without(range(COUNT - faults, COUNT)))
    found = find_largest(range(COUNT), asked, suspects=guess)
    check(found, asked, range(COUNT))
    assert found.blamed == tuple(range(COUNT - faults, COUNT))
    assert found.unknown == ()
    assert found.complete
    assert len(asked.asked) <= 14


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(COUNT - 8, COUNT - 1), min_size=1, max_size=5))
def test_an_order_that_is_nearly_right_finds_them_too(faults):
    asked = Counting(without(faults))
    found = find_largest(range(COUNT), asked)
    check(found, asked, range(COUNT))
    assert set(found.blamed) == faults
    assert len(asked.asked) <= 18


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, COUNT - 1), min_size=1, max_size=5), st.integers(0, 10))
def test_without_an_order_it_is_exact_and_the_count_is_bounded(faults, guess):
    asked = Counting(without(faults))
    found = find_largest(range(COUNT), asked, suspects=guess)
    check(found, asked, range(COUNT))
    assert set(found.blamed) == faults
    # 1 + 2 log2(200) for the prefix; for each other fault all that is left, two halves of each of six sizes, and four
    assert len(asked.asked) <= 17 * len(faults)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.floats(0, 1))
def test_a_predicate_that_is_not_monotone_gives_a_set_that_was_evaluated(seed, count, share):
    def rule(low):
        return random.Random(hash((seed, tuple(sorted(low))))).random() < share

    asked = Counting(rule)
    found = find_largest(range(count), asked)
    check(found, asked, range(count))
    assert found.complete


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, COUNT - 1), max_size=5), st.integers(0, 40))
def test_a_budget_ends_the_search_with_what_it_has(faults, budget):
    asked = Counting(without(faults), budget)
    found = find_largest(range(COUNT), asked)
    check(found, asked, range(COUNT))
    assert len(asked.asked) <= budget
    assert set(found.blamed) <= faults
    if found.complete:
        assert set(found.blamed) == faults


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, COUNT - 1), max_size=5), st.sampled_from([2, 5, 20, 200]))
def test_groups_first_then_their_items(faults, size):
    groups = [range(start, start + size) for start in range(0, COUNT, size)]
    asked = Counting(without(faults))
    found = find_largest(range(COUNT), asked, groups=groups)
    check(found, asked, range(COUNT))
    assert set(found.blamed) == faults


def test_a_fault_that_needs_two_items_costs_one_of_them():
    found = find_largest(range(COUNT), lambda low: not {50, 150} <= low)
    assert found.blamed == (150,)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_few_items(count):
    assert find_largest(range(count), lambda low: True).holds == tuple(range(count))
    asked = Counting(lambda low: False)
    found = find_largest(range(count), asked)
    assert (found.holds, found.blamed) == ((), tuple(range(count)))


def test_all_items_fail():
    asked = Counting(lambda low: not low)
    found = find_largest(range(COUNT), asked)
    assert (found.holds, len(found.blamed), found.unknown) == ((), COUNT, ())
