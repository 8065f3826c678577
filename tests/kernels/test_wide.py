"""amp::wide_*: the native op's arguments, dtypes and shapes, fp32's arithmetic, one rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from amp_compiler.kernels.wide import FORMS, OPS

pytestmark = pytest.mark.usefixtures("implementation")
aten: Any = torch.ops.aten
LOW = (torch.bfloat16, torch.float16)


def cases(dtype: torch.dtype) -> dict[Any, tuple[tuple[Any, ...], dict[str, Any]]]:
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 4, 6, 6).to(dtype), torch.randn(6, 2, 3, 3).to(dtype), torch.randn(6).to(dtype)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)
    q, k, v = (torch.randn(2, 2, 5, 8).to(dtype) for _ in range(3))
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logs = attention(q, k, v)
    return {
        aten.convolution.default: ((x, w, b, *rest), {}),
        aten.convolution_backward.default: (
            (torch.randn(2, 6, 6, 6).to(dtype), x, w, [6], *rest, [False, True, True]), {}),
        aten.baddbmm.default: ((q[0], q[0], k[0].transpose(1, 2)[..., :8, :5].expand(2, 8, 5) @ q[0]), {"beta": 0.5}),
        attention: ((q, k, v), {"scale": 0.3}),
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
            (torch.randn_like(out), q, k, v, out, logs, 0.0, False), {}),
    }  # fmt: skip


def leaves(result: Any) -> list[Tensor | None]:
    return list(pytree.tree_leaves(result, is_leaf=lambda x: x is None))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("op", list(OPS), ids=lambda op: op._schema.name.removeprefix("aten::"))
def test_rounds_fp32s_result_once(op: Any, dtype: torch.dtype) -> None:
    args, kwargs = cases(dtype)[op]
    got = leaves(FORMS[op](*args, **kwargs))
    native = leaves(op(*args, **kwargs))
    floats, named = pytree.tree_map(
        lambda x: x.float() if isinstance(x, Tensor) and x.dtype is dtype else x, (args, kwargs)
    )
    exact = leaves(op(*floats, **named))
    assert len(got) == len(native)
    for mine, theirs, wide in zip(got, native, exact, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs is None
            continue
        assert wide is not None
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if "attention" in op._schema.name:  # its sums are added up in another order than torch's
            torch.testing.assert_close(mine, wide.to(mine.dtype), rtol=torch.finfo(mine.dtype).eps, atol=1e-6)
        else:
            assert torch.equal(mine, wide.to(mine.dtype))


@pytest.mark.parametrize("op", list(OPS), ids=lambda op: op._schema.name.removeprefix("aten::"))
def test_torch_itself_finds_nothing_wrong(op: Any) -> None:
    args, kwargs = cases(torch.bfloat16)[op]
    torch.library.opcheck(FORMS[op], args, kwargs)


LAST = torch.channels_last
#: images, input channels, height, width, output channels
SHAPES = st.tuples(*(st.integers(1, most) for most in (3, 40, 9, 70, 40)))


@given(shape=SHAPES, last=st.booleans(), weight_last=st.booleans(), dtype=st.sampled_from(LOW))
@example(shape=(2, 70, 24, 24, 300), last=False, weight_last=False, dtype=torch.bfloat16)
@example(shape=(2, 300, 24, 24, 70), last=True, weight_last=True, dtype=torch.float16)
@settings(max_examples=30, deadline=None)
def test_kernels_of_one_pixel(
    shape: tuple[int, int, int, int, int], last: bool, weight_last: bool, dtype: torch.dtype
) -> None:
    """Forward and both gradients: small integers have exact sums in any order, so results are equal bit for bit; their
    order in memory is that of torch's convolution."""
    images, inputs, height, width, outputs = shape
    torch.manual_seed(0)

    def numbers(*sizes: int) -> Tensor:
        return torch.randint(-3, 4, sizes).float()

    x, g = numbers(images, inputs, height, width), numbers(images, outputs, height, width)
    w = numbers(outputs, inputs, 1, 1)
    x, g = (t.contiguous(memory_format=LAST) if last else t for t in (x, g))
    w = w.contiguous(memory_format=LAST) if weight_last else w
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    cases: list[tuple[Any, tuple[Tensor, ...], tuple[Any, ...]]] = [
        (aten.convolution.default, (x, w), (None, *rest)),
        (aten.convolution_backward.default, (g, x, w), (None, *rest, [True, True, False])),
        (aten.convolution_backward.default, (g, x, w), (None, *rest, [False, True, False])),
        (aten.convolution_backward.default, (g, x, w), (None, *rest, [True, False, False])),
    ]
    for op, tensors, more in cases:
        got, exact = leaves(FORMS[op](*(t.to(dtype) for t in tensors), *more)), leaves(op(*tensors, *more))
        for mine, wide in zip(got, exact, strict=True):
            assert (mine is None) == (wide is None)
            if mine is not None and wide is not None:
                assert torch.equal(mine, wide.to(dtype))
                shaped = [d for d in range(4) if wide.shape[d] > 1]
                assert [mine.stride(d) for d in shaped] == [wide.stride(d) for d in shaped]


@st.composite
def windows(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[int], list[int], list[int]]:
    """The sizes of images and filters, strides, padding and dilation, of one dimension or two; filters read one channel
    or all of them."""
    dim = draw(st.sampled_from([1, 2, 2]))
    images, inputs = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 5, 16, 33]))
    read = draw(st.sampled_from([inputs, inputs, 1]))
    outputs = draw(st.integers(1, 70)) if read == inputs else inputs * draw(st.integers(1, 2))
    kernel, stride, dilation = ([draw(st.integers(1, most)) for _ in range(dim)] for most in (4, 3, 2))
    padding = [draw(st.integers(0, 4)) for _ in range(dim)]
    least = [max(d * (k - 1) + 1 - 2 * p, 1) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    sizes = [draw(st.integers(least[d], least[d] + (60 if d == dim - 1 else 9))) for d in range(dim)]
    return (images, inputs, *sizes), (outputs, read, *kernel), stride, padding, dilation


@given(window=windows(), biased=st.booleans(), dtype=st.sampled_from(LOW), threads=st.sampled_from([1, 2]))
@example(window=((2, 40, 70, 70), (70, 40, 3, 3), [1, 1], [1, 1], [1, 1]), biased=True, dtype=LOW[0], threads=2)
@example(window=((1, 3, 90, 90), (9, 3, 7, 7), [2, 2], [3, 3], [1, 1]), biased=False, dtype=LOW[1], threads=2)
@example(window=((3, 200, 8, 90), (24, 200, 3, 3), [1, 1], [1, 1], [1, 1]), biased=False, dtype=LOW[0], threads=2)
@example(window=((2, 5, 9, 40), (7, 5, 2, 3), [2, 2], [1, 1], [1, 1]), biased=False, dtype=LOW[0], threads=2)
@example(window=((1, 16, 7, 70), (9, 16, 3, 4), [3, 3], [0, 4], [2, 2]), biased=False, dtype=LOW[1], threads=1)
@example(window=((3, 3, 4, 51), (20, 3, 1, 1), [2, 3], [2, 4], [1, 1]), biased=True, dtype=LOW[1], threads=2)
# one pixel at a time: those of several small images side by side, in groups, and in groups that differ
@example(window=((4, 400, 7, 7), (330, 400, 1, 1), [1, 1], [0, 0], [1, 1]), biased=True, dtype=LOW[0], threads=2)
@example(window=((11, 2048, 10, 9), (64, 2048, 1, 1), [1, 1], [0, 0], [1, 1]), biased=True, dtype=LOW[1], threads=2)
@example(window=((13, 1000, 19), (132, 1000, 1), [1], [0], [1]), biased=False, dtype=LOW[1], threads=1)
# windows on a few small images, whose pixels are side by side: many weights, in groups, dilated, a sequence
@example(window=((1, 512, 7, 7), (130, 512, 3, 3), [1, 1], [1, 1], [1, 1]), biased=True, dtype=LOW[0], threads=2)
@example(window=((3, 600, 4, 3), (331, 600, 3, 3), [1, 1], [1, 1], [1, 1]), biased=True, dtype=LOW[1], threads=2)
@example(window=((4, 512, 7, 7), (512, 512, 3, 3), [1, 1], [1, 1], [1, 1]), biased=False, dtype=LOW[0], threads=2)
@example(window=((3, 3000, 5, 5), (121, 3000, 3, 4), [1, 1], [1, 1], [1, 1]), biased=True, dtype=LOW[1], threads=2)
@example(window=((1, 900, 5, 5), (115, 900, 2, 4), [1, 1], [2, 4], [1, 2]), biased=True, dtype=LOW[1], threads=2)
@example(window=((1, 1024, 3, 3), (512, 1024, 1, 1), [1, 1], [1, 1], [1, 1]), biased=True, dtype=LOW[0], threads=2)
@example(window=((2, 700, 9), (300, 700, 3), [1], [4], [3]), biased=False, dtype=LOW[0], threads=1)
# filters of one channel: more rows than a stripe has, padding beyond the window, two for each channel, many weights,
# a sequence, a stride, which is torch's
@example(window=((2, 3, 90, 120), (3, 1, 3, 3), [1, 1], [1, 1], [1, 1]), biased=True, dtype=LOW[0], threads=2)
@example(window=((3, 20, 14, 14), (20, 1, 5, 5), [1, 1], [6, 5], [1, 1]), biased=False, dtype=LOW[1], threads=2)
@example(window=((2, 9, 11, 17), (18, 1, 3, 2), [1, 1], [2, 0], [2, 3]), biased=True, dtype=LOW[1], threads=1)
@example(window=((2, 6, 19, 33), (6, 1, 7, 7), [1, 1], [3, 3], [1, 1]), biased=True, dtype=LOW[0], threads=2)
@example(window=((2, 40, 300), (40, 1, 4), [1], [3], [1]), biased=True, dtype=LOW[1], threads=2)
@example(window=((2, 8, 15, 15), (8, 1, 3, 3), [2, 2], [1, 1], [1, 1]), biased=True, dtype=LOW[0], threads=2)
# torch's kernel, with channels last: results, images' and filters' gradients, in parts that do not divide
@example(window=((16, 64, 16, 16), (64, 64, 3, 3), [1, 1], [1, 1], [1, 1]), biased=True, dtype=LOW[0], threads=2)
@example(window=((5, 32, 14, 15), (40, 32, 3, 3), [2, 2], [1, 1], [1, 1]), biased=False, dtype=LOW[1], threads=2)
@example(window=((3, 48, 19, 7), (17, 48, 1, 1), [2, 2], [0, 0], [1, 1]), biased=True, dtype=LOW[0], threads=1)
@example(window=((2, 16, 33, 20), (21, 16, 2, 3), [1, 2], [1, 0], [1, 2]), biased=False, dtype=LOW[1], threads=2)
# results that read nothing but padding, for which oneDNN crashes with channels last
@example(window=((2, 64, 3, 1), (64, 64, 1, 1), [1, 3], [2, 2], [1, 2]), biased=True, dtype=LOW[0], threads=1)
@example(window=((16, 512, 3, 1), (17, 512, 1, 1), [1, 3], [2, 2], [1, 3]), biased=False, dtype=LOW[1], threads=2)
@settings(max_examples=60, deadline=None)
def test_any_window(window: Any, biased: bool, dtype: torch.dtype, threads: int) -> None:
    """Forward and all gradients, bit for bit: small integers have exact sums in any order."""
    x_size, w_size, stride, padding, dilation = window
    torch.manual_seed(0)

    def numbers(*sizes: int) -> Tensor:
        return torch.randint(-2, 3, sizes).float()

    x, w, bias = numbers(*x_size), numbers(*w_size), numbers(w_size[0]) if biased else None
    rest = (stride, padding, dilation, False, [0] * len(stride), x_size[1] // w_size[1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        exact = aten.convolution.default(x, w, bias, *rest)
        low = [None if t is None else t.to(dtype) for t in (x, w, bias)]
        result = FORMS[aten.convolution.default](*low, *rest)
        assert torch.equal(result, exact.to(dtype))
        assert result.is_contiguous()
        g = numbers(*exact.shape)
        for mask in ([True, True, biased], [True, False, False], [False, True, False]):
            more = ([w_size[0]] if biased else None, *rest, mask)
            wide = aten.convolution_backward.default(g, x, w, *more)
            got = FORMS[aten.convolution_backward.default](g.to(dtype), low[0], low[1], *more)
            for mine, theirs in zip(leaves(got), leaves(wide), strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or (mine.is_contiguous() and torch.equal(mine, theirs.to(dtype)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [(0, 0), (3, -1), (-1, 0)], ids=str)
@pytest.mark.parametrize(
    ("inputs", "filters", "groups", "size"), [(3, 5, 1, (8, 20)), (3, 3, 3, (8, 20)), (256, 256, 1, (4, 5))]
)
def test_what_is_not_finite_reaches_only_what_reads_it(
    inputs: int, filters: int, groups: int, size: tuple[int, int], place: tuple[int, int], value: float
) -> None:
    """A pixel at the edge of an image, or of its gradient, has no part in the sums of some weights and pixels. (Not
    compared: the weights' gradient from an infinite gradient, which is multiplied with the zeros of the padding.)"""
    torch.manual_seed(0)
    w, rest = torch.randn(filters, inputs // groups, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    x, g = torch.randn(2, inputs, *size), torch.randn(2, filters, *size)
    for spoiled in (x, g):
        before = spoiled[(1, 2, *place)].clone()
        spoiled[(1, 2, *place)] = value
        cases: list[tuple[Any, tuple[Tensor, ...], tuple[Any, ...]]] = [
            (aten.convolution.default, (x, w), (None, *rest)),
            (aten.convolution_backward.default, (g, x, w), ([filters], *rest, [True, spoiled is x, spoiled is x])),
        ]
        for op, tensors, more in cases:
            low = [t.half() for t in tensors]
            for mine, wide in zip(leaves(FORMS[op](*low, *more)), leaves(op(*tensors, *more)), strict=True):
                assert (mine is None) == (wide is None)
                assert mine is None or wide is None or torch.equal(mine.isfinite(), wide.isfinite())
        spoiled[(1, 2, *place)] = before
