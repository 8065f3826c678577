"""Floating-point operations counted at run time: against numbers made by hand, and against torch's counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from amp_compiler import amp_compile
from amp_compiler.inspect.profile import count_all, count_casts, count_flops, count_ops
from amp_compiler.kernels import cast_matmul as _defines  # noqa: F401
from amp_compiler.kernels.wide import FORMS
from networks import NETWORKS

BF16, FP32 = torch.bfloat16, torch.float32
aten = torch.ops.aten
A, B = torch.ones(4, 3), torch.ones(3, 5)
QUERY, KEY = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 6, 8)
IMAGE, FILTER = torch.ones(2, 4, 9, 9), torch.ones(6, 4, 3, 3)
SCORES = 2 * 2 * 3 * 4 * 6 * 8  # one of attention's products: query times key, or weights times value


def backward(op: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], None]:
    """The forward and the backward, with gradients for all."""

    def run() -> None:
        leaves = [t.detach().requires_grad_() for t in tensors]
        op(*leaves).sum().backward()

    return run


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param(lambda: A @ B, {FP32: 120}, id="mm"),
        pytest.param(lambda: A.to(BF16) @ B.to(BF16), {BF16: 120}, id="low mm"),
        pytest.param(lambda: (A @ B, A.to(BF16) @ B.to(BF16)), {FP32: 120, BF16: 120}, id="both"),
        pytest.param(lambda: A.double() @ B.double(), {torch.float64: 120}, id="double"),
        pytest.param(lambda: torch.addmm(torch.ones(5), A, B), {FP32: 120}, id="addmm"),
        pytest.param(lambda: torch.ones(4, 5).addmm_(A, B), {FP32: 120}, id="addmm in place"),
        pytest.param(lambda: torch.mm(A, B, out=torch.empty(4, 5)), {FP32: 120}, id="out="),
        pytest.param(lambda: A @ torch.ones(3), {FP32: 24}, id="mv"),
        pytest.param(lambda: torch.ones(7) @ torch.ones(7), {FP32: 14}, id="dot"),
        pytest.param(lambda: torch.ones(2, 4, 3) @ torch.ones(2, 3, 5), {FP32: 240}, id="bmm"),
        pytest.param(lambda: torch.baddbmm(torch.ones(5), A[None], B[None]), {FP32: 120}, id="baddbmm"),
        pytest.param(lambda: torch.einsum("ij,jk->ik", A, B), {FP32: 120}, id="einsum"),
        pytest.param(lambda: A[:0] @ B, {FP32: 0}, id="empty"),
        pytest.param(lambda: A + A * A.exp(), {}, id="elementwise"),
        pytest.param(backward(torch.mm, A, B), {FP32: 360}, id="mm and its backward"),
        pytest.param(lambda: F.conv2d(IMAGE, FILTER), {FP32: 2 * 2 * 6 * 4 * 9 * 49}, id="convolution"),
        pytest.param(
            lambda: F.conv2d(IMAGE, FILTER, stride=2, padding=(1, 0)), {FP32: 2 * 2 * 6 * 4 * 9 * 20}, id="strided"
        ),
        pytest.param(
            lambda: F.conv2d(IMAGE, FILTER[:, :2], groups=2, dilation=2), {FP32: 2 * 2 * 6 * 2 * 9 * 25}, id="groups"
        ),
        pytest.param(
            backward(lambda x, w: F.conv2d(x, w, groups=2), IMAGE, FILTER[:, :2]),
            {FP32: 3 * 2 * 2 * 6 * 2 * 9 * 49},
            id="groups and their backward",
        ),
        pytest.param(
            lambda: F.conv_transpose2d(torch.ones(2, 6, 3, 3), FILTER, stride=2),
            {FP32: 2 * 2 * 6 * 4 * 9 * 9},
            id="transposed",
        ),
        pytest.param(lambda: F.scaled_dot_product_attention(QUERY, KEY, KEY), {FP32: 2 * SCORES}, id="attention"),
        pytest.param(
            backward(F.scaled_dot_product_attention, QUERY, KEY, KEY), {FP32: 7 * SCORES}, id="attention's backward"
        ),
        pytest.param(
            lambda: torch.ops.amp.cast_matmul.default(A, B, None, BF16, FP32), {BF16: 120}, id="ours, fp32 operands"
        ),
        pytest.param(
            lambda: torch.ops.amp.cast_matmul.default(A[None], B.to(torch.float16)[None], None, torch.float16, FP32),
            {torch.float16: 120},
            id="ours, batched",
        ),
        pytest.param(
            lambda: FORMS[aten.convolution.default](
                IMAGE.to(BF16), FILTER.to(BF16), None, [2, 2], [1, 0], [1, 1], False, [0, 0], 1
            ),
            {BF16: 2 * 2 * 6 * 4 * 9 * 20},
            id="ours, convolution",
        ),
    ],
)
def test_counts_made_by_hand(program: Callable[[], object], expected: dict[torch.dtype, int]) -> None:
    assert count_flops(program) == expected


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_our_backwards_count_like_the_ops_they_replace(dtype: torch.dtype) -> None:
    """In the low dtype, though they compute in fp32."""
    x, w = IMAGE.to(dtype), FILTER.to(dtype)
    gradient = torch.ones(2, 6, 7, 7, dtype=dtype)
    rest = ([6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    q, k, out = (t.to(dtype) for t in (QUERY, KEY, QUERY))
    convolution, attention = (
        FORMS[op]
        for op in (
            aten.convolution_backward.default,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        )
    )
    one = 2 * 2 * 6 * 4 * 9 * 49
    for mask in ([True, True, True], [False, True, True], [False, False, True]):
        found = count_flops(lambda mask=mask: convolution(gradient, x, w, *rest, mask))
        assert found == {dtype: sum(mask[:2]) * one}
    logs = torch.ones(2, 3, 4)
    assert count_flops(lambda: attention(out, q, k, k, out, logs, 0.0, False)) == {dtype: 5 * SCORES}


def test_autocast_counts_where_it_computes() -> None:
    with torch.autocast("cpu", BF16):
        assert count_flops(lambda: F.linear(A, B.t())) == {BF16: 120}
        assert count_flops(lambda: F.conv2d(IMAGE, FILTER)) == {BF16: 2 * 2 * 6 * 4 * 9 * 49}


def test_an_lstm_of_one_op_counts_like_one_of_many() -> None:
    """oneDNN runs a layer as one op; without it torch runs products, and no gradient of the first state."""
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 16, num_layers=2), torch.randn(5, 2, 8)
    with torch.inference_mode():
        fused = count_flops(lambda: model(x))
        with torch.backends.mkldnn.flags(enabled=False):
            assert count_flops(lambda: model(x)) == fused
    assert fused == {FP32: 2 * 5 * 2 * (64 * 8 + 64 * 16 + 2 * 64 * 16)}
    assert count_flops(lambda: model(x)[0].sum().backward()) == {FP32: 3 * fused[FP32]}
    fast = amp_compile(model, dtype=BF16)
    x.requires_grad_()
    fast(x)[0].sum().backward()
    assert count_flops(lambda: fast(x)[0].sum().backward()) == {BF16: 3 * fused[FP32]}
    assert "FLOPs in low precision: 100.0%" in str(fast.report())


@pytest.mark.parametrize("name", ["dense", "conv_bn", "llama", "masked_attention", "unet", "resnet", "functional_mix"])
def test_fp32_agrees_with_torchs_counter(name: str) -> None:
    model, args = NETWORKS[name]()

    def step() -> None:
        model(*args).float().sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    assert count_flops(step) == {FP32: counter.get_total_flops()}


SIZES = st.integers(1, 5)


@settings(max_examples=25)
@given(
    batch=SIZES, groups=st.integers(1, 3), inputs=st.integers(1, 3), outputs=st.integers(1, 3), size=st.integers(5, 8),
    kernel=st.integers(1, 3), stride=st.integers(1, 3), padding=st.integers(0, 2), dilation=st.integers(1, 2),
    transposed=st.booleans(),
)  # fmt: skip
def test_any_convolution(
    batch: int, groups: int, inputs: int, outputs: int, size: int, kernel: int, stride: int, padding: int,
    dilation: int, transposed: bool,
) -> None:  # fmt: skip
    """Forward as torch counts it; the backward takes twice as much."""
    x = torch.ones(batch, groups * inputs, size, size, requires_grad=True)
    shape = (groups * inputs, outputs) if transposed else (groups * outputs, inputs)
    weight = torch.ones(*shape, kernel, kernel, requires_grad=True)
    op = F.conv_transpose2d if transposed else F.conv2d

    def forward() -> Tensor:
        return op(x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)

    try:
        with FlopCounterMode(display=False) as counter:
            forward()
    except RuntimeError:  # padding took all of a transposed convolution's output
        return
    expected = counter.get_total_flops()
    assert count_flops(forward) == {FP32: expected}
    assert count_flops(lambda: forward().sum().backward()) == {FP32: 3 * expected}


@settings(max_examples=25)
@given(m=SIZES, k=SIZES, n=SIZES, batch=st.lists(SIZES, max_size=2))
def test_any_product(m: int, k: int, n: int, batch: list[int]) -> None:
    a, b = torch.ones(*batch, m, k), torch.ones(*batch, k, n)
    total = 2 * m * k * n
    for size in batch:
        total *= size
    assert count_flops(lambda: a @ b) == {FP32: total}


def test_one_record_gives_what_each_count_gives_alone() -> None:
    model, args = NETWORKS["dense"]()

    def step() -> None:
        with torch.autocast("cpu", BF16):
            loss = model(*args).float().sum()
        loss.backward()

    step()
    together = count_all(step)
    assert together.casts == count_casts(step)
    assert together.ops == count_ops(step)
    assert together.flops == count_flops(step)
    assert set(together.flops) == {BF16}
