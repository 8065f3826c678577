"""The Triton ``cast_matmul`` in Triton's interpreter, on CPU tensors, against fp64.

The bound of every comparison: operands and bias are rounded to the low dtype exactly as the kernel does it, then

    |result - exact| <= terms · 2^-24 · (Σ|a||b| + |bias|) + half an ulp of the output dtype

Products of two fp16 or bf16 numbers are exact in fp32; each of at most K additions (and one for the bias) rounds by at
most 2^-24 of a partial sum, which is at most Σ|a||b|; the last rounding costs half an ulp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from amp_compiler.kernels import cast_matmul_triton
from amp_compiler.kernels.cast_matmul_configs import SHORTEST, STEP, TARGETS
from amp_compiler.kernels.cast_matmul_triton import cast_matmul
from amp_compiler.kernels.interpret import interpreted

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ANY, LOW = (FP32, FP16, BF16), (FP16, BF16)
INF, NAN = math.inf, math.nan

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning:triton")  # numpy, about inf and NaN


@pytest.fixture(autouse=True, scope="module")
def in_the_interpreter() -> Iterator[None]:
    with interpreted(cast_matmul_triton):
        yield


def numbers(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def compare(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    result = cast_matmul(a, b, bias, dtype, out_dtype)
    left, right = a.to(dtype).double(), b.to(dtype).double()
    extra = torch.zeros(b.shape[-1], dtype=torch.float64) if bias is None else bias.to(dtype).double()
    exact = left @ right + extra
    assert result.dtype is out_dtype
    assert result.shape == exact.shape
    assert result.is_contiguous()
    sums = left.abs() @ right.abs() + extra.abs()
    accumulation = (a.shape[-1] + 1) * 2.0**-24 * sums
    limits = torch.finfo(out_dtype)
    rounding = limits.eps / 2 * (exact.abs() + accumulation).clamp(min=limits.tiny)
    assert ((result.double() - exact).abs() <= accumulation + rounding).all()
    return result


@pytest.mark.parametrize(("a", "b", "low"), [*product(ANY, ANY, LOW)])
def test_dtypes(a: torch.dtype, b: torch.dtype, low: torch.dtype) -> None:
    for out in (low, FP32):
        compare(numbers(9, 21, dtype=a), numbers(21, 18, dtype=b), numbers(18, dtype=a), low, out)


def test_rounds_to_nearest_even() -> None:
    halfway = torch.tensor([[1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1.9999, 65519.0, 65520.0]])
    one = torch.ones(1, 1)
    for low in LOW:
        for a in (halfway.t(), halfway.t() * -1):
            assert torch.equal(cast_matmul(a, one, None, low, FP32), a.to(low).float())
        assert torch.equal(cast_matmul(one, torch.zeros(1, 7), halfway[0], low, FP32), halfway.to(low).float())


def test_the_sum_is_rounded_once() -> None:
    a = torch.tensor([[1.0, 2.0**-11, 2.0**-11]])  # in fp16 each step alone would be lost
    assert cast_matmul(a, torch.ones(3, 1), None, FP16, FP16).item() == 1 + 2.0**-10
    bias = torch.tensor([2.0**-11])  # the bias joins before the rounding
    assert cast_matmul(a[:, :2], torch.ones(2, 1), bias, FP16, FP16).item() == 1 + 2.0**-10


sizes = st.integers(1, 40)


@given(
    m=sizes,
    n=sizes,
    k=st.integers(0, 140),
    batch=st.sampled_from([None, None, 1, 2, 3]),
    a_dtype=st.sampled_from(ANY),
    b_dtype=st.sampled_from(ANY),
    low=st.sampled_from(LOW),
    wide_out=st.booleans(),
    bias=st.sampled_from([None, *ANY]),
    transposed=st.tuples(st.booleans(), st.booleans()),
    gaps=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    unbatched=st.sampled_from(["", "", "a", "b"]),
)
@settings(max_examples=40)
def test_ragged_shapes_and_strides(
    m: int,
    n: int,
    k: int,
    batch: int | None,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    low: torch.dtype,
    wide_out: bool,
    bias: torch.dtype | None,
    transposed: tuple[bool, bool],
    gaps: tuple[int, int],
    unbatched: str,
) -> None:
    def operand(name: str, rows: int, columns: int, dtype: torch.dtype, turned: bool, gap: int) -> Tensor:
        """Every other element of a larger matrix that holds NaN elsewhere, perhaps transposed."""
        shape = () if batch is None or unbatched == name else (batch,)
        shape += (columns, rows) if turned else (rows, columns)
        around = torch.full((*shape[:-2], gap * shape[-2] + 1, gap * shape[-1] + 1), NAN).to(dtype)
        inside = around[..., : gap * shape[-2] : gap, : gap * shape[-1] : gap]
        inside.copy_(numbers(*shape))
        return inside.mT if turned else inside

    a = operand("a", m, k, a_dtype, transposed[0], gaps[0])
    b = operand("b", k, n, b_dtype, transposed[1], gaps[1])
    compare(a, b, None if bias is None else numbers(n, dtype=bias), low, FP32 if wide_out else low)


@pytest.mark.parametrize("low", LOW)
def test_several_tiles(low: torch.dtype) -> None:
    compare(numbers(150, 70), numbers(140, 70).t(), numbers(140), low, low)


def test_every_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows of two tiles, the last of both in part: more than one group. The large tiles differ in size only."""
    for config in {c for target in TARGETS.values() for c in target.configs if c.block_m * c.block_n <= 1024}:
        monkeypatch.setattr(cast_matmul_triton, "choose", lambda *args, config=config: (config, 1))
        compare(numbers(9 * config.block_m + 3, 70), numbers(70, config.block_n + 5), None, BF16, BF16)


def test_broadcast_batch() -> None:
    b = numbers(11, 6).expand(3, 11, 6)
    assert b.stride(0) == 0
    expected = compare(numbers(3, 5, 11), b, None, BF16, FP32)
    assert torch.equal(expected, compare(numbers(3, 5, 11), b[:1], None, BF16, FP32))
    assert torch.equal(expected, compare(numbers(3, 5, 11), b[0], None, BF16, FP32))
    compare(numbers(1, 5, 11), b, None, BF16, FP32)
    compare(numbers(5, 11), b, None, BF16, FP32)
    compare(numbers(5, 3, 11).transpose(0, 1), b[0], None, BF16, FP32)  # a batch that is no tall matrix


def test_bias_with_strides() -> None:
    bias = torch.stack([numbers(7), torch.full((7,), NAN)], 1)[:, 0]
    compare(numbers(3, 4), numbers(4, 7), bias, FP16, FP16)
    compare(numbers(3, 4), numbers(4, 7), torch.tensor(0.1).expand(7), FP16, FP16)
    compare(numbers(3, 4), numbers(4, 7), numbers(7).double(), FP16, FP16)


def _split(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """Matrices as small as these are not split otherwise: the second kernel would cost more than it saves."""
    config = next(config for config in TARGETS["sm_80"].configs if config.block_m * config.block_n <= 1024)
    monkeypatch.setattr(cast_matmul_triton, "choose", lambda *args: (config, pieces))


@pytest.mark.parametrize("k", [2 * SHORTEST, 2 * SHORTEST + 1, 3 * SHORTEST - 1, 3 * SHORTEST])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_split_k(k: int, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    added = []
    add = cast_matmul_triton.add_pieces_kernel

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            added.append(grid)
            return add[grid]

    monkeypatch.setattr(cast_matmul_triton, "add_pieces_kernel", Spy())
    _split(monkeypatch, k // SHORTEST)
    a, b, bias = numbers(*batch, 3, k), numbers(*batch, 5, k).mT, numbers(5)
    first = compare(a, b, bias, BF16, FP32)
    assert torch.equal(first, cast_matmul(a, b, bias, BF16, FP32))
    compare(a.half(), b, None, FP16, FP16)
    assert len(added) == 3


def test_pieces_of_k_are_all_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _split(monkeypatch, 5)
    a = torch.zeros(1, 5 * SHORTEST)
    for place in (0, STEP - 1, STEP, SHORTEST, 3 * SHORTEST - 1, 3 * SHORTEST, 5 * SHORTEST - 1):
        a[0, place] = 1.0
    assert cast_matmul(a, torch.ones(5 * SHORTEST, 1), None, FP16, FP32).item() == 7


@pytest.mark.parametrize("low", LOW)
def test_zero_sizes(low: torch.dtype) -> None:
    bias = numbers(4)
    assert torch.equal(cast_matmul(torch.ones(3, 0), torch.ones(0, 4), None, low, FP32), torch.zeros(3, 4))
    expected = bias.to(low).expand(3, 4)
    assert torch.equal(cast_matmul(torch.ones(3, 0), torch.ones(0, 4), bias, low, low), expected)
    for a, b in (((0, 3), (3, 4)), ((3, 3), (3, 0)), ((0, 2, 3), (0, 3, 4)), ((0, 2, 3), (3, 4)), ((2, 0, 3), (3, 4))):
        result = cast_matmul(torch.ones(a), torch.ones(b), None, low, low)
        assert result.shape == torch.matmul(torch.ones(a), torch.ones(b)).shape
        assert result.dtype is low


@given(
    m=sizes,
    n=sizes,
    k=sizes,
    low=st.sampled_from(LOW),
    bad=st.sampled_from([INF, -INF, NAN]),
    data=st.data(),
)
@settings(max_examples=25)
def test_infinities_stay_in_their_row(
    m: int, n: int, k: int, low: torch.dtype, bad: float, data: st.DataObject
) -> None:
    """And memory right behind the operands, all NaN, reaches nobody."""
    a, b = (torch.full((m + 3, k + 3), NAN)[:m, :k], torch.full((k + 3, n + 3), NAN)[:k, :n])
    a.copy_(numbers(m, k)), b.copy_(numbers(k, n))
    row, column = data.draw(st.integers(0, m - 1)), data.draw(st.integers(0, k - 1))
    a[row, column] = bad
    result = cast_matmul(a, b, None, low, FP32)
    touched = torch.arange(m) == row
    assert result[~touched].isfinite().all()
    assert not result[touched].isfinite().any() or (b[column] == 0).any()


def test_overflow() -> None:
    large = torch.full((1, 1), 300.0)
    assert cast_matmul(large, large, None, FP16, FP16).item() == INF
    assert cast_matmul(large, large, None, FP16, FP32).item() == 90000
    assert cast_matmul(torch.full((1, 1), 1e30), torch.zeros(1, 1), None, FP16, FP32).isnan()  # inf · 0
    assert cast_matmul(torch.full((1, 1), 1e30), torch.ones(1, 1), None, BF16, BF16).item() == pytest.approx(1e30, 1e-2)


@pytest.mark.parametrize("turned", [False, True])
def test_offsets_over_2_31(turned: bool, tmp_path: Path) -> None:
    """A matrix that spans 6 GB of a file with holes: rows 2^30 elements apart."""
    apart = 2**30
    far = torch.from_file(str(tmp_path / "far"), shared=True, size=3 * apart, dtype=FP16)
    a = far.as_strided((3, 4), (apart, 1))
    a.copy_(numbers(3, 4))
    if turned:
        compare(numbers(5, 3), a, None, FP16, FP32)  # far along K
    else:
        compare(a, numbers(4, 5), None, FP16, FP32)
    assert cast_matmul_triton._spans_far(a)
    assert not cast_matmul_triton._spans_far(a[:1, :])


def test_inputs_are_not_written() -> None:
    operands = numbers(4, 5), numbers(5, 6), numbers(6)
    before = [x.clone() for x in operands]
    cast_matmul(*operands, BF16, BF16)
    assert all(torch.equal(x, y) for x, y in zip(operands, before, strict=True))


def test_wrong_arguments() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    with pytest.raises(TypeError, match="rounds to float16 or bfloat16"):
        cast_matmul(a, b, None, FP32, FP32)
    with pytest.raises(TypeError, match="or float32, not"):
        cast_matmul(a, b, None, FP16, BF16)
    with pytest.raises(TypeError, match=r"b is torch\.float64"):
        cast_matmul(a, b.double(), None, FP16, FP16)
    with pytest.raises(ValueError, match=r"a is \[3\]"):
        cast_matmul(a[0], b, None, FP16, FP16)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        cast_matmul(a, a, None, FP16, FP16)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        cast_matmul(a.expand(2, 2, 3), b.expand(3, 3, 4), None, FP16, FP16)
    with pytest.raises(ValueError, match="4 columns"):
        cast_matmul(a, b, torch.ones(3), FP16, FP16)
    with pytest.raises(ValueError, match="one device"):
        cast_matmul(a, b.to("meta"), None, FP16, FP16)


@pytest.mark.parametrize("target", TARGETS)
def test_configurations(target: str) -> None:
    configs = TARGETS[target].configs
    assert len(configs) <= 8
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert config.reason
        assert STEP % config.block_k == 0
    assert any(config.takes_unaligned for config in configs)
