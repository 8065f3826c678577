"""The minimum cut against brute force: the same time, the same number of differing ops, the same number of casts."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_compiler.cost.placement import Cast, Problem, Use

FEMTO = 1e-15
PLACES = 10**6  # of one digit of a rank in an int64


def random_problem(seed: int, free: int, fixed: int, most: int) -> Problem:
    """Ops in order, values read by later ops, small whole costs so that ties are common, and a few bounds."""
    rng = random.Random(seed)

    def cost() -> float:
        return rng.randint(0, most) * FEMTO

    problem, kinds = Problem(), [False] * free + [True] * fixed
    rng.shuffle(kinds)
    for is_fixed in kinds:
        problem.add_op(cost(), cost(), usual=rng.random() < 0.5, fixed=is_fixed)
    for maker in range(len(kinds)):
        for _ in range(rng.choice((1, 1, 1, 2))):  # an op of several results
            later = range(maker, len(kinds))
            readers = rng.choices(later, k=rng.choice((0, 1, 1, 2, 3, 4)))  # one may read it twice
            trained = rng.random() < 0.5
            uses = [Use(reader, cost(), cost()) if trained else Use(reader) for reader in readers]
            problem.add_value(maker, cost(), cost(), uses)
    for op in range(1, len(kinds)):
        other = rng.randrange(op)
        if rng.random() < 0.15 and (problem.ops[other].usual or not problem.ops[op].usual):
            problem.bind(op, other)
    return problem


def best_rank(problem: Problem) -> tuple[int, int, int]:
    """The smallest rank of all assignments that are allowed, each of them looked at."""
    free = [number for number, op in enumerate(problem.ops) if not op.fixed]
    codes = np.arange(1 << len(free))
    low = np.empty((len(problem.ops), len(codes)), dtype=bool)
    for number, op in enumerate(problem.ops):
        low[number] = op.usual
    for place, number in enumerate(free):
        low[number] = codes >> place & 1
    rank = np.zeros(len(codes), dtype=np.int64)
    for number, op in enumerate(problem.ops):
        rank += np.where(low[number], op.low, op.fp32) * PLACES**2 + (low[number] != op.usual) * PLACES
    for value in problem.values:
        down, up = np.zeros(len(codes), bool), np.zeros(len(codes), bool)
        for reader, widened, rounded in value.uses:
            narrows, widens = ~low[value.maker] & low[reader], low[value.maker] & ~low[reader]
            rank += (narrows * widened + widens * rounded) * PLACES**2
            down |= narrows
            up |= widens
        rank += (down * value.to_low + up * value.to_fp32) * PLACES**2 + down + up
    allowed = np.ones(len(codes), bool)
    for op, other in problem.bounds:
        if not (problem.ops[op].fixed and problem.ops[other].fixed):
            allowed &= ~low[op] | low[other]
    best = int(rank[allowed].min())
    return best // PLACES**2, best // PLACES % PLACES, best % PLACES


def check(problem: Problem) -> None:
    found = problem.solve()
    assert problem.allows(found)
    assert problem.rank(found) == best_rank(problem)


sizes = {"seed": st.integers(0, 2**32), "fixed": st.integers(0, 8), "most": st.sampled_from([1, 3, 20])}


@given(free=st.integers(0, 12), **sizes)
@settings(max_examples=200)
def test_equals_brute_force(seed: int, free: int, fixed: int, most: int) -> None:
    check(random_problem(seed, free, fixed, most))


@pytest.mark.zoo
@given(free=st.integers(1, 16), **sizes)
@settings(max_examples=1000)
def test_equals_brute_force_on_1000_graphs(seed: int, free: int, fixed: int, most: int) -> None:
    check(random_problem(seed, free, fixed, most))


@given(free=st.integers(1, 40), **sizes)
@settings(max_examples=50)
def test_no_single_change_is_better(seed: int, free: int, fixed: int, most: int) -> None:
    """Also beyond what brute force can do; and what a change is said to cost is the difference of the two times."""
    problem = random_problem(seed, free, fixed, most)
    found = problem.solve()
    assert problem.seconds(found) <= problem.seconds(problem.usual)
    for op, change in problem.changes(found).items():
        other = [not low if number == op else low for number, low in enumerate(found)]
        assert change is None or change.seconds >= 0
        if problem.allows(other):
            assert change is not None
            assert change.seconds == pytest.approx(problem.seconds(other) - problem.seconds(found), abs=FEMTO / 2)


def chain(*times: tuple[float, float], cast: float, start: bool, end: bool) -> Problem:
    """Free ops in a row, between two that are fixed."""
    problem = Problem()
    ops = [problem.add_op(0, 0, usual=start, fixed=True)]
    ops += [problem.add_op(*pair, usual=False) for pair in times]
    ops.append(problem.add_op(0, 0, usual=end, fixed=True))
    for maker, reader in pairwise(ops):
        problem.add_value(maker, cast, cast, [Use(reader)])
    return problem


def test_a_chain_runs_low_as_soon_as_that_pays_for_its_casts() -> None:
    assert chain((1.0, 2.0), (1.0, 2.0), cast=1.5, start=False, end=False).solve() == (False,) * 4
    assert chain(*[(1.0, 2.0)] * 4, cast=1.5, start=False, end=False).solve() == (False, True, True, True, True, False)


def test_one_cast_serves_all_readers_of_one_value() -> None:
    """Three fp32 ops read a low value and are read by fp32 ones: one cast before them beats three behind them."""
    problem = Problem()
    product = problem.add_op(0, 0, usual=True, fixed=True)
    norm = problem.add_op(0, 0, usual=False, fixed=True)
    free = [problem.add_op(1.0, 2.0, usual=True) for _ in range(3)]
    problem.add_value(product, 0, 3.0, [Use(op) for op in free])
    for op in free:
        problem.add_value(op, 3.0, 3.0, [Use(norm)])
    assert problem.solve() == (True, False, False, False, False)
    assert problem.seconds(problem.solve()) == 3.0 + 3 * 2.0
    assert problem.changes(problem.solve())[free[0]] == (3.0 - 1.0, -1.0, (Cast(1, to_low=False),), ())


def test_gradients_are_cast_for_each_use() -> None:
    """The same, in training: the three gradients that come back need a cast each, so that nothing is won any more."""
    problem = Problem()
    product = problem.add_op(0, 0, usual=True, fixed=True)
    norm = problem.add_op(0, 0, usual=False, fixed=True)
    free = [problem.add_op(1.0, 2.0, usual=True) for _ in range(3)]
    problem.add_value(product, 0, 3.0, [Use(op, 3.0, 3.0) for op in free])
    for op in free:
        problem.add_value(op, 3.0, 3.0, [Use(norm)])
    assert problem.solve() == (True, False, True, True, True)


def test_ties_go_to_the_usual_choice_and_then_to_fewer_casts() -> None:
    for usual in (False, True):
        problem = Problem()
        free = problem.add_op(1.0, 1.0, usual=usual)
        problem.add_value(free, 0, 0, [])
        assert problem.solve() == (usual,)
    problem = Problem()
    first, second = (problem.add_op(1.0, 1.0, usual=low) for low in (True, False))
    problem.add_value(first, 0, 0, [Use(second)])
    assert problem.solve() == (True, False)  # a cast that costs nothing, and both as usual
    problem = Problem()
    product, norm = (problem.add_op(0, 0, usual=low, fixed=True) for low in (True, False))
    one, two = (problem.add_op(1.0, 1.0, usual=low) for low in (True, False))
    problem.add_value(product, 0, 0, [Use(one), Use(two)])
    problem.add_value(one, 0, 0, [Use(norm)])
    problem.add_value(two, 0, 0, [Use(norm)])
    assert problem.rank(problem.solve())[1:] == (0, 2)


def test_an_op_that_moves_values_is_never_lower_than_they_are() -> None:
    problem = Problem()
    source = problem.add_op(0, 0, usual=False, fixed=True)
    cat = problem.add_op(low=1.0, fp32=9.0, usual=False)
    problem.add_value(source, 0.1, 0.1, [Use(cat)])
    assert problem.solve()[cat] is True
    problem.bind(cat, source)
    assert problem.solve()[cat] is False
    assert not problem.allows((False, True))
    assert problem.changes((False, False)) == {cat: None}


def test_nothing_to_choose() -> None:
    assert Problem().solve() == ()
    problem = Problem()
    only = problem.add_op(5.0, 1.0, usual=True, fixed=True)
    problem.add_value(only, 1.0, 1.0, [Use(only)])
    assert problem.solve() == (True,)
