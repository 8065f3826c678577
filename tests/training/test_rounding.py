"""Stochastic rounding takes a neighbour and is right on average; a compensated sum is within one rounding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler.training.masters import LowWeights
from amp_compiler.training.rounding import belongs, round_stochastically, split
from helpers import BF16, F16, F32

INF = float("inf")
DTYPES = st.sampled_from([BF16, F16])
#: any fp32 number, and those around the smallest and the largest numbers of fp16
NUMBERS = st.one_of(
    st.floats(width=32), st.floats(2.0**-27, 2.0**-12, width=32), st.floats(-65536, 65536, width=32)
)  # fmt: skip


def neighbours(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """The largest number of ``dtype`` that is not above a value, and the smallest that is not below it."""
    near = torch.tensor(value).to(dtype)
    up, down = (torch.nextafter(near, torch.full_like(near, bound)) for bound in (INF, -INF))
    if near.item() > value:
        return down.item(), near.item()
    return near.item(), (near if near.item() == value else up).item()


@given(st.lists(NUMBERS, min_size=1, max_size=20), DTYPES, st.integers(0, 99))
def test_the_result_is_a_neighbour_and_what_fits_stays(values: list[float], dtype: torch.dtype, seed: int) -> None:
    found = round_stochastically(torch.tensor(values), dtype, torch.Generator().manual_seed(seed))
    assert found.dtype == dtype
    for value, rounded in zip(values, found.tolist(), strict=True):
        if math.isnan(value):
            assert math.isnan(rounded)
        else:
            assert rounded in neighbours(value, dtype), value


@given(st.floats(2.0**-26, 60000, width=32), st.sampled_from([1, -1]), DTYPES, st.integers(0, 99))
def test_the_mean_is_the_value(size: float, sign: int, dtype: torch.dtype, seed: int) -> None:
    value, number = sign * size, 4096
    low, high = neighbours(value, dtype)
    found = round_stochastically(torch.full((number,), value), dtype, torch.Generator().manual_seed(seed))
    ups = int((found == high).sum())
    share = 1.0 if low == high else (value - low) / (high - low)
    # Bernstein's inequality: a fair count is further off once in e**20 / 2 times
    assert abs(ups - number * share) <= math.sqrt(40 * number * share * (1 - share)) + 14


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_what_stays(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([largest, -largest, INF, -INF, float("nan"), 0.0, -0.0])
    found = round_stochastically(values, dtype, torch.Generator())
    assert torch.equal(found[:4], values[:4].to(dtype))
    assert found[4].isnan()
    assert torch.equal(found[5:].signbit(), torch.tensor([False, True]))
    assert round_stochastically(torch.tensor([70000.0]), F16, torch.Generator()).item() == INF
    assert bool(round_stochastically(torch.tensor([-1e-30]), F16, torch.Generator()).signbit())


@given(st.lists(NUMBERS, min_size=1, max_size=20), DTYPES)
def test_a_remainder_belongs_to_its_value(values: list[float], dtype: torch.dtype) -> None:
    given_ = torch.tensor(values)
    rounded, rest = split(given_, dtype)
    assert torch.equal(rounded.nan_to_num(), given_.to(dtype).nan_to_num())
    assert bool((belongs(rounded, rest) | rounded.isnan()).all())
    ordinary = rounded.isfinite() & (rounded.abs() >= 2 * torch.finfo(dtype).smallest_normal / torch.finfo(dtype).eps)
    again = split(rounded.float() + rest.float(), dtype)
    assert torch.equal(again[0].nan_to_num(), rounded.nan_to_num())
    assert torch.equal(again[1], rest)
    error = (rounded.double() + rest.double() - given_.double()).abs()
    unit = torch.finfo(dtype).eps * rounded.abs().double()
    assert bool((error <= unit * torch.finfo(dtype).eps / 2)[ordinary].all())


def unit(values: Tensor) -> Tensor:
    """The distance of two bf16 numbers at these values."""
    _, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - 8)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(0.5, 2, width=32), st.floats(-(2.0**-7), 2.0**-7, width=32)), min_size=1, max_size=8),
    st.integers(1, 100),
)
def test_a_compensated_sum_of_small_updates(pairs: list[tuple[float, float]], steps: int) -> None:
    start, update = torch.tensor(pairs).unbind(1)
    weight = nn.Parameter(start.to(BF16))
    weight.grad_dtype = F32
    optimizer, weights = torch.optim.SGD([weight], lr=1.0), LowWeights("kahan")
    exact, largest = weight.detach().double(), weight.detach().double().abs()
    for _ in range(steps):
        weight.grad = -update
        with weights.updating(optimizer):
            optimizer.step()
        exact = exact + update.double()
        largest = torch.maximum(largest, exact.abs())
    # A step rounds the remainder, which is at most half a unit, to 8 bits (2**-8 of a unit at a tie), and adds twice in
    # fp32 (2**-24 of the value, which is at most 2**8 units). At the end the weight itself is rounded once.
    allowed = unit(largest) * (0.5 + steps * (2.0**-8 + 2.0**-15))
    assert bool(((weight.detach().double() - exact).abs() <= allowed).all())
    assert bool((allowed < unit(largest)).all())
