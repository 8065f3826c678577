"""finish_products: additions, multiplications and relu after a product become a part of it, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from amp_compiler import Policy, amp_compile, convert_model, ir
from amp_compiler.common.errors import PipelineError
from amp_compiler.kernels import cpu
from amp_compiler.passes import finish_products, fold_casts, fuse_cast_matmul
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from helpers import BF16, F16, LOW, check_pass, context, functional

PASS = finish_products.PASS
X, W, B, Y = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5), torch.randn(4, 5).to(BF16)
_SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 7e4)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.SETTING, "wide")


def ops(gm: fx.GraphModule) -> list[str]:
    return [ir.op_name(n) for n in gm.graph.nodes if n.op == "call_function" and not ir.is_getitem(n)]


def fused(fn: Any, *inputs: Tensor, dynamic: bool = False) -> fx.GraphModule:
    gm = functional(fn, *inputs, dynamic=dynamic)
    fold_casts.PASS.run(gm, context())
    fuse_cast_matmul.PASS.run(gm, context())
    return gm


def product(x: Tensor, w: Tensor) -> Tensor:
    return x.to(BF16) @ w.to(BF16).t()


def test_all_three_steps_become_a_part_of_the_product() -> None:
    fn = lambda x, w, y: torch.relu((product(x, w) + y) * y)  # noqa: E731
    check_pass(PASS, fused(fn, X, W, Y), inputs=(X, W, Y), modified=True, expected_text="""
        input x_1: f32[4, 3]
        input w_1: f32[5, 3]
        input y_1: bf16[4, 5]
        t_default: f32[3, 5] = t(w_1)
        cast_matmul_default_3: bf16[4, 5] = cast_matmul(x_1, t_default, None, bf16, bf16, plus=y_1, times=y_1, relu=True)
        return cast_matmul_default_3
    """)  # fmt: skip  # noqa: E501


def test_a_view_between_the_product_and_the_addition_stays() -> None:
    x, y = torch.randn(2, 4, 3), torch.randn(2, 4, 5).to(BF16)
    gm = fused(lambda x, w, y: y + product(x.view(8, 3), w).view(2, 4, 5), x, W, y)
    check_pass(PASS, gm, inputs=(x, W, y), modified=True)
    assert ops(gm) == ["view", "t", "amp::cast_matmul", "view"]


def test_the_later_of_two_products_adds_the_other() -> None:
    """The other may be made after the product that adds it, which then moves behind it."""
    gm = check_pass(PASS, fused(lambda x, w: product(x, w) + product(x * 2, w), X, W), inputs=(X, W), modified=True)
    assert ops(gm).count("amp::cast_matmul") == 2
    assert "add" not in ops(gm)
    gm = check_pass(
        PASS, fused(lambda x, w: (product(x, w) + product(x * 2, w).relu()).relu(), X, W), inputs=(X, W), modified=True
    )
    assert set(ops(gm)) == {"t", "mul", "amp::cast_matmul"}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, y: (lambda p: (p + y, p))(product(x, w)),  # the product is wanted too
        lambda x, w, y: (lambda p: p + p)(product(x, w)),
        lambda x, w, y: torch.add(product(x, w), y, alpha=2),
        lambda x, w, y: product(x, w) + 1.0,
        lambda x, w, y: product(x, w) + y[0],  # a row for every row
        lambda x, w, y: product(x, w) + y.float(),  # in fp32
        lambda x, w, y: product(x[:1], w) + y,  # the sum is larger
        lambda x, w, y: product(x, w).t() + y.t(),  # another order of the elements
        lambda x, w, y: product(x, w) + y.t().contiguous().t(),  # strides that differ
        lambda x, w, y: product(x, w).sin() + y,
        lambda x, w, y: x @ w.t() + y.float(),
    ],
    ids=["two-readers", "itself", "alpha", "number", "row", "fp32", "broadcast", "turned", "strides", "sin-between",
         "fp32-product"],
)  # fmt: skip
def test_what_stays(fn: Callable[..., Any]) -> None:
    check_pass(PASS, fused(fn, X, W, Y), inputs=(X, W, Y), modified=False)


def test_steps_in_another_order_keep_it() -> None:
    """The kernel adds, then multiplies: a sum after a product with another matrix is an op of its own."""
    gm = fused(lambda x, w, y: product(x, w) * y + y, X, W, Y)
    check_pass(PASS, gm, inputs=(X, W, Y), modified=True)
    assert ops(gm) == ["t", "amp::cast_matmul", "add"]


def test_autocasts_own_numerics_are_left_alone() -> None:
    gm = fused(lambda x, w, y: product(x, w) + y, X, W, Y)
    assert PASS.run(gm, context(policy=Policy.torch("cpu", BF16))) is False


def test_needs_fused_products() -> None:
    with pytest.raises(PipelineError, match="fused"):
        Pipeline((PASS,), (facts.FUNCTIONAL, facts.FOLDED))


@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 7, 16, 33, 70])] * 3), low=st.sampled_from(LOW), batch=st.integers(0, 3),
    steps=st.tuples(st.booleans(), st.booleans(), st.booleans()), special=st.booleans(), swapped=st.booleans(),
    dynamic=st.booleans(),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_steps_give_the_same_bits(
    sizes: tuple[int, int, int], low: torch.dtype, batch: int, steps: tuple[bool, bool, bool], special: bool,
    swapped: bool, dynamic: bool,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    m, k, n = (max(size, 2) for size in sizes)  # torch makes sizes of 1 static
    lead = (batch + 1,) if batch else ()
    x, w, y, z = torch.randn(*lead, m, k), torch.randn(*lead, k, n), torch.randn(*lead, m, n), torch.randn(*lead, m, n)
    if special:
        y.view(-1)[: len(_SPECIAL)] = torch.tensor(_SPECIAL)[: y.numel()]
        z.view(-1)[1::3] = torch.tensor(_SPECIAL)[torch.arange(len(z.view(-1)[1::3])) % len(_SPECIAL)]
    y, z = y.to(low), z.to(low)

    def fn(x: Tensor, w: Tensor, y: Tensor, z: Tensor) -> Tensor:
        result = x.to(low) @ w.to(low)
        if steps[0]:
            result = y + result if swapped else result + y
        if steps[1]:
            result = z * result if swapped else result * z
        return result.relu() if steps[2] else result

    check_pass(PASS, fused(fn, x, w, y, z, dynamic=dynamic), inputs=(x, w, y, z), modified=any(steps))


# ------------------------------------------------------------------------------------------- in a compiled model


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.wide = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return x + self.wide(torch.relu(self.wide(x)))


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_network_gives_the_same_bits_without_the_pass(low: torch.dtype, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Block(48).eval()
    fast = amp_compile(model, dtype=low, backend="eager", dynamic=dynamic)
    plain = amp_compile(model, dtype=low, backend="eager", dynamic=dynamic, disable_passes=["finish_products"])
    for rows in (3, 40):
        x = torch.randn(2, rows, 48)
        with torch.no_grad():
            assert torch.equal(fast(x), plain(x))
    assert "relu=True" in fast.history[-1].text
    assert "times=" in fast.history[-1].text
    assert "plus=" in fast.history[-1].text


def test_a_training_step_keeps_its_ops() -> None:
    fast = amp_compile(Block(8), dtype=BF16, backend="eager")
    fast(torch.randn(2, 3, 8)).sum().backward()
    assert not any(record.name == "finish_products" and record.modified for record in fast.history)


def test_inductor_fuses_by_itself() -> None:
    fast = amp_compile(Block(8).eval(), dtype=BF16, backend="inductor")
    with torch.no_grad():
        fast(torch.randn(2, 3, 8))
    assert not any(record.name == "finish_products" and record.modified for record in fast.history)


@pytest.mark.parametrize("low", LOW)
def test_a_converted_model_uses_it(low: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Block(48).eval(), torch.randn(40, 48)
    converted = convert_model(model, (x,), dtype=low)
    plain = convert_model(model, (x,), dtype=low, disable_passes=["finish_products"])
    for other in (converted, plain):
        other.cache_weights = False  # products of fp32 copies are not ours
    assert torch.equal(converted(x), plain(x))
    assert torch.equal(converted(x), plain(x))
    assert any(record.name == "finish_products" and record.modified for record in converted.history)


def test_fp16_overflows_as_before() -> None:
    """A sum that does not fit is infinite before something is multiplied with it: each step rounds."""
    x, w, y = torch.full((2, 2), 100.0), torch.full((2, 2), 300.0), torch.full((2, 2), 3e4, dtype=F16)
    fn = lambda x, w, y: (x.to(F16) @ w.to(F16) + y) * (y * 0)  # noqa: E731
    gm = check_pass(PASS, fused(fn, x, w, y), modified=True)
    assert gm(x, w, y).isnan().all()
