"""The statistics of tensors, against a direct computation with numpy and torch's own rounding."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_compiler.runtime.record import Range, Tally, merge, range_of

LOW = st.sampled_from([torch.float16, torch.bfloat16])
#: values at and around every limit of both dtypes, and any others
EDGES = (65504.0, 65520.0, 2.0**-24, 2.0**-25, 2.0**-14, 2.0**-126, 2.0**-133, 2.0**-134, 3.39e38)
LIMITS = [m * (1 + d) for m in EDGES for d in (0.0, 2.0**-23, -(2.0**-23), 2.0**-10)]
VALUES = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from(LIMITS).map(lambda v: float(np.float32(v))),
    st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan"), torch.finfo(torch.float32).min]),
)
TENSORS = st.lists(VALUES, max_size=40).map(lambda v: torch.tensor(v, dtype=torch.float32))


def direct(x: Tensor, low: torch.dtype) -> Range:
    """The same, the slow way: everything that is not finite, or the largest fp32 number, counts as infinite."""
    x = x.reshape(-1)
    kept = x[x.isfinite() & (x.abs() < torch.finfo(torch.float32).max)]
    magnitude = kept.abs().numpy().astype(np.float64)
    rounded = kept.to(low)
    nonzero = magnitude[magnitude > 0]
    normal = torch.finfo(low).smallest_normal
    exponents = Counter(max(int(e) - 1, -127) for e in np.frexp(nonzero)[1])
    return Range(
        x.numel(), float(magnitude.max(initial=0)), float(nonzero.min()) if nonzero.size else 0.0,
        int(rounded.isinf().sum()), int(((rounded == 0) & (kept != 0)).sum()),
        int(((rounded != 0) & (rounded.double().abs() < normal)).sum()), x.numel() - kept.numel(),
        1 if x.numel() else 0, tuple(sorted(exponents.items())),
    )  # fmt: skip


@given(TENSORS, LOW)
def test_equals_a_direct_computation(x: Tensor, low: torch.dtype) -> None:
    assert range_of(x, low) == direct(x, low)


@given(st.lists(TENSORS, max_size=4), LOW)
def test_tensors_one_by_one_equal_all_at_once(tensors: list[Tensor], low: torch.dtype) -> None:
    tally = Tally(low)
    for tensor in tensors:
        tally.see(tensor)
    assert tally.range == direct(torch.cat([torch.empty(0), *tensors]), low)
    assert merge(range_of(t, low) for t in reversed(tensors)) == tally.range


@pytest.mark.parametrize("size", [65535, 65536, 65537, 200_003])
def test_large_tensors(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)) * torch.logspace(-10, 7, size)
    found, wanted = range_of(x, torch.float16), direct(x, torch.float16)
    for name in ("elements", "max_abs", "min_nonzero", "overflows", "flushed", "subnormals", "infinite"):
        assert getattr(found, name) == getattr(wanted, name), name
    counts = dict(wanted.exponents)
    assert found.nonzero == pytest.approx(wanted.nonzero, rel=1e-3)
    for exponent, number in found.exponents:
        assert number == pytest.approx(counts[exponent], rel=0.2, abs=20)  # a sample of 2**15 or more


FORMS = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, None, :1].expand(-1, 3, 5),
    "a scalar expanded": lambda x: x[0, 0].expand(4, 5),
    "channels last": lambda x: x.reshape(2, 3, 4, -1).contiguous(memory_format=torch.channels_last),
    "fp64": lambda x: x.double(),
    "complex": lambda x: torch.complex(x, x * 2),
    "a scalar": lambda x: x[1, 2],
}


@pytest.mark.parametrize("name", FORMS)
def test_any_layout(name: str) -> None:
    x = FORMS[name](torch.randn(6, 8, generator=torch.Generator().manual_seed(0)) * 1e4)
    plain = torch.view_as_real(x).contiguous() if x.is_complex() else x.contiguous()
    assert range_of(x, torch.float16) == direct(plain.float(), torch.float16)


def test_sparse() -> None:
    x = torch.sparse_coo_tensor([[0, 2, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    assert range_of(x, torch.float16).max_abs == 5.0


def test_the_tensor_stays_as_it_is() -> None:
    x = torch.tensor([-1.0, float("inf"), 3.0], requires_grad=True)
    range_of(x, torch.float16, 2.0)
    assert x.tolist() == [-1.0, float("inf"), 3.0]


@given(TENSORS, LOW, st.integers(-10, 10))
def test_scaled_while_recording(x: Tensor, low: torch.dtype, power: int) -> None:
    assert range_of(x, low, 2.0**power) == direct(x * 2.0**power, low)


@given(st.lists(st.floats(2.0**-60, 2.0**60, width=32)).map(torch.tensor), st.integers(-40, 40))
def test_scaled_afterwards_by_exponents(x: Tensor, power: int) -> None:
    found, wanted = range_of(x, torch.float16).times(2.0**power, torch.float16), direct(x * 2.0**power, torch.float16)
    assert (found.max_abs, found.min_nonzero, found.exponents) == (
        wanted.max_abs, wanted.min_nonzero, wanted.exponents)  # fmt: skip
    near = {15, -25, -26, -15}  # the exponents of values for which more than the exponent matters
    if not near & {e for e, _ in found.exponents}:
        assert (found.overflows, found.flushed, found.subnormals) == (
            wanted.overflows, wanted.flushed, wanted.subnormals)  # fmt: skip
