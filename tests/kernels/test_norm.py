"""The norm of a list of gradients, compiled and in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_compiler.kernels.norm import total_norm

pytestmark = pytest.mark.usefixtures("implementation")
CPU = torch.device("cpu")


@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    kind=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), exponent=st.integers(-18, 18),
)  # fmt: skip
def test_as_of_one_long_vector(sizes: list[int], kind: torch.dtype, exponent: int) -> None:
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) * 10.0**exponent for n in sizes]
    tensors[0] = tensors[0].to(kind)
    got = total_norm(tensors, CPU)
    exact = torch.cat([t.double() for t in tensors]).norm()
    assert got.dtype is torch.float32
    # a bf16 norm of torch's own is rounded to bf16; an fp32 sum of 70 squares is off by 70 roundings at most
    eps = torch.finfo(torch.bfloat16 if kind is torch.bfloat16 else torch.float32).eps
    assert abs(float(got) - float(exact)) <= 70 * eps * float(exact)


def test_large_tensors_by_several_threads_and_other_layouts() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(300, 1000), torch.randn(100, 7)[:, ::2], torch.randn(30, 20).t()]
    sparse = torch.tensor([[0.0, 3.0], [4.0, 0.0]]).to_sparse()
    exact = torch.cat([t.double().flatten() for t in (*tensors, sparse.to_dense())]).norm()
    assert float(total_norm([*tensors, sparse], CPU)) == pytest.approx(float(exact), rel=1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_shows(bad: float) -> None:
    assert not total_norm([torch.ones(40), torch.tensor([1.0, bad])], CPU).isfinite()
