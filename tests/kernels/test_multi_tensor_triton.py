"""The Triton ``non_finite``, ``unscale`` and ``unscale_`` in Triton's interpreter, against the references in torch.

Results are equal bit for bit: a product of two fp32 numbers, rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from amp_compiler.kernels import multi_tensor_triton
from amp_compiler.kernels.all_finite import reference as all_finite_reference
from amp_compiler.kernels.interpret import interpreted
from amp_compiler.kernels.multi_tensor_triton import BLOCK, CHUNK, SUPPORTED, non_finite, unscale, unscale_
from amp_compiler.kernels.unscale import reference as unscale_reference

INF, NAN = math.inf, math.nan

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning:triton")  # numpy, about inf and NaN


@pytest.fixture(autouse=True, scope="module")
def in_the_interpreter() -> Iterator[None]:
    with interpreted(multi_tensor_triton):
        yield


def same(a: Tensor, b: Tensor) -> bool:
    nan = a.isnan()
    return a.dtype is b.dtype and torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan])


def check_all(tensors: list[Tensor], factor: float = 0.3) -> None:
    """All three functions on the tensors, against the references."""
    inverse, before = torch.tensor(factor), [tensor.clone() for tensor in tensors]
    flag = non_finite(tensors)
    assert (flag.shape, flag.dtype) == ((), torch.float32)
    assert flag.item() == float(not all_finite_reference(tensors))

    found = torch.zeros(1)
    results, found_out = unscale(tensors, inverse, found)
    expected, expected_found = unscale_reference(tensors, inverse, found)
    assert torch.equal(found_out, expected_found)
    assert found.item() == 0.0
    for result, wanted, tensor, old in zip(results, expected, tensors, before, strict=True):
        assert same(result, wanted)
        assert result.stride() == torch.empty_like(tensor, dtype=torch.float32).stride()
        assert same(tensor, old)

    assert unscale_(tensors, inverse, found) is None
    assert torch.equal(found, expected_found)
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert same(tensor, wanted.to(tensor.dtype))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(SUPPORTED, key=str)))
    shapes = [(), (1,), (0,), (7,), (3, 5), (2, 0, 3), (2, 3, 4), (BLOCK,), (BLOCK + 1,), (40, 60)]
    shape = draw(st.sampled_from(shapes))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    kind = draw(st.sampled_from(["plain", "plain", "turned", "gaps", "unaligned"]))
    if kind == "turned":
        tensor = tensor.permute(tuple(range(tensor.dim()))[::-1])
    elif kind == "gaps" and tensor.dim():
        tensor = torch.stack([tensor, torch.full_like(tensor, NAN)], -1)[..., 0]  # NaN in every gap
    elif kind == "unaligned":
        tensor = torch.cat([torch.tensor([NAN], dtype=dtype), tensor.flatten()])[1:].view(shape)
    bad = draw(st.sampled_from([None, None, None, INF, -INF, NAN]))
    if bad is not None and tensor.numel():
        tensor[tuple(draw(st.integers(0, size - 1)) for size in tensor.shape)] = bad
    return tensor


@given(some=st.lists(tensors(), max_size=6), factor=st.sampled_from([1.0, 0.3, 2.0**-16, 0.0, INF, 2.0**20]))
@settings(max_examples=40)
def test_mixed_lists(some: list[Tensor], factor: float) -> None:
    check_all(some, factor)


@pytest.mark.parametrize("size", [CHUNK, CHUNK + 1, 2 * CHUNK + BLOCK - 1])
def test_chunks(size: int) -> None:
    for place in (None, 0, BLOCK, CHUNK - 1, size - 1):
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).half()
        if place is not None:
            tensor[place] = INF
        check_all([torch.ones(3, dtype=torch.float16), tensor, torch.ones(5, dtype=torch.float16)])


@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("name", ["max", "min", "tiny", "smallest_normal", "eps"])
def test_limits_are_finite(dtype: torch.dtype, name: str) -> None:
    check_all([torch.full((9,), getattr(torch.finfo(dtype), name), dtype=dtype)], 1.0)


def test_what_was_found_before_stays() -> None:
    found = torch.ones(())
    assert unscale([torch.ones(3)], torch.tensor(0.5), found)[1].item() == 1.0
    unscale_([torch.ones(3)], torch.tensor(0.5), found)
    assert found.item() == 1.0


def test_nothing() -> None:
    check_all([])
    check_all([torch.empty(0), torch.empty(0, 3, dtype=torch.float16)])
    assert non_finite([]).item() == 0.0


def test_memory_behind_a_tensor_is_nobodys_business() -> None:
    memory = torch.full((64,), NAN)
    memory[16:32] = 1.0
    check_all([memory[16:32]])
    assert memory[:16].isnan().all()
    assert memory[32:].isnan().all()


def test_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    kernel = multi_tensor_triton.unscale_kernel

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(multi_tensor_triton, "unscale_kernel", Spy())
    non_finite([torch.ones(n, dtype=dtype) for dtype in SUPPORTED for n in (1, 5, CHUNK + 1)])
    assert launches == [(4,)] * 3  # one a dtype


def test_in_place_is_seen_by_autograd() -> None:
    leaf = torch.ones(3, requires_grad=True)
    grad = torch.ones(3)
    product = (leaf * grad).sum()
    unscale_([grad], torch.tensor(0.5), torch.zeros(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        unscale_([torch.ones(2)], torch.tensor(0.5), torch.zeros(1))


def test_wrong_arguments() -> None:
    factor, found = torch.tensor(0.5), torch.zeros(1)
    with pytest.raises(TypeError, match="float64"):
        non_finite([torch.ones(2).double()])
    with pytest.raises(TypeError, match="sparse"):
        non_finite([torch.eye(2).to_sparse()])
    with pytest.raises(TypeError, match="one float32 number"):
        unscale([torch.ones(2)], torch.ones(2), found)
    with pytest.raises(TypeError, match="one float32 number"):
        unscale_([torch.ones(2)], factor, found.double())
    with pytest.raises(ValueError, match="one device"):
        unscale([torch.ones(2, device="meta")], factor, found)
    with pytest.raises(RuntimeError, match="single memory location"):
        unscale_([torch.ones(1).expand(4)], factor, found)
