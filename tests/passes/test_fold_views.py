"""fold_views: views of views and copies that nothing needs go; what shares or keeps memory stays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amp_compiler import ir
from amp_compiler.common.errors import PipelineError
from amp_compiler.passes import fold_casts
from amp_compiler.passes.fold_views import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.verify import verify
from helpers import aten, check_pass, context, functional, unchanged


def ops(gm: torch.fx.GraphModule) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in gm.graph.nodes if n.op == "call_function"]


def test_a_transposition_of_a_transposition() -> None:
    x = torch.randn(2, 3)
    gm = functional(lambda x: x.t().t().transpose(0, 1).transpose(1, 0) * 2, x)
    check_pass(PASS, gm, inputs=[x], modified=True, expected_text="""
        input x_1: f32[2, 3]
        mul: f32[2, 3] = mul.Tensor(x_1, 2)
        return mul
    """)


def test_a_view_of_a_view() -> None:
    x = torch.randn(2, 6)
    gm = functional(lambda x: (x * 2).view(3, 4).view(12).view(12) + 1, x)
    check_pass(PASS, gm, inputs=[x], modified=True, expected_text="""
        input x_1: f32[2, 6]
        mul: f32[2, 6] = mul.Tensor(x_1, 2)
        view_2: f32[12] = view(mul, [12])
        add: f32[12] = add.Tensor(view_2, 1)
        return add
    """)


def test_a_view_with_other_users_stays() -> None:
    x = torch.randn(4)
    gm = functional(lambda x: (x.view(2, 2).view(4) + 1, x.view(2, 2) * 2), x)
    check_pass(PASS, gm, inputs=[x], modified=True)
    assert ops(gm) == ["add.Tensor", "view.default", "mul.Tensor"]


def test_a_copy_that_nothing_needs() -> None:
    """Dropout in eval mode is one."""
    x = torch.randn(3)
    gm = functional(lambda x: (x * 2).clone() + 1, x)
    check_pass(PASS, gm, inputs=[x], modified=True)
    assert ops(gm) == ["mul.Tensor", "add.Tensor"]


def test_a_copy_that_is_returned_stays() -> None:
    x = torch.randn(4)
    unchanged(PASS, functional(lambda x: (x * 2).clone(), x), inputs=[x])
    unchanged(PASS, functional(lambda x: (x * 2).clone().view(2, 2), x), inputs=[x])


def test_a_copy_that_saves_a_value_from_being_overwritten_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        before = x.clone()
        x.copy_(x * 2)
        return before + x

    x = torch.randn(3)
    unchanged(PASS, functional(fn, x), inputs=[x])


def test_a_copy_of_an_input_or_of_a_result_stays() -> None:
    """The caller may write to either before the backward reads the copy."""
    x = torch.randn(3)
    unchanged(PASS, functional(lambda x: x.clone() + 1, x), inputs=[x])

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.clone() + 1

    unchanged(PASS, functional(fn, x), inputs=[x])


def test_a_copy_in_another_order_stays() -> None:
    x = torch.randn(2, 3)
    gm = functional(lambda x: x.t().clone(memory_format=torch.contiguous_format).view(6) + 1, x)
    unchanged(PASS, gm, inputs=[x])


def test_another_pair_of_dimensions_stays() -> None:
    x = torch.randn(2, 3, 4)
    unchanged(PASS, functional(lambda x: x.transpose(0, 1).transpose(1, 2) * 2, x), inputs=[x])


def test_an_input_is_not_returned_in_the_place_of_its_view() -> None:
    x = torch.randn(2, 3)
    unchanged(PASS, functional(lambda x: x.t().t(), x), inputs=[x])


def test_a_view_of_what_is_not_contiguous_stays() -> None:
    x = torch.randn(2, 3, 4)
    unchanged(PASS, functional(lambda x: x.transpose(0, 1).view(3, 2, 2, 2).view(3, 2, 4) + 1, x), inputs=[x])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_that_come_together_are_folded(dtype: torch.dtype) -> None:
    """Dropout in eval mode stood between them, before an fft. Every low value is the same in fp32 and as complex."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).view(256, 256)

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = aten._to_copy(x, dtype=torch.float32)
        between = aten._to_copy(aten.clone(wide), dtype=torch.complex64)
        return wide * 2, aten.view_as_real(between) * 1, aten.view_as_real(aten._to_copy(x, dtype=torch.complex64)) * 1

    gm = functional(fn, x)
    fold_casts.PASS.run(gm, context())
    assert len([n for n in gm.graph.nodes if ir.is_cast(n)]) == 3
    check_pass(PASS, gm, modified=True, inputs=[x])
    assert [ir.cast_dtype(n) for n in gm.graph.nodes if ir.is_cast(n)] == [torch.float32, torch.complex64]
    assert all(ir.cast_source(n).op == "placeholder" for n in gm.graph.nodes if ir.is_cast(n))
    verify(gm, (facts.FOLDED,), context(), PASS.name)


def test_a_rounding_that_comes_before_a_cast_stays() -> None:
    x = torch.randn(4, 4)
    gm = functional(lambda x: aten._to_copy(aten.clone(x.bfloat16()), dtype=torch.float64) + 1, x)
    check_pass(PASS, gm, modified=True, inputs=[x])
    assert [ir.cast_dtype(n) for n in gm.graph.nodes if ir.is_cast(n)] == [torch.bfloat16, torch.float64]


def test_it_needs_a_functional_graph() -> None:
    with pytest.raises(PipelineError, match="needs 'functional'"):
        Pipeline((PASS,), ())


STEPS = {
    "t": lambda x: x.t(), "swap": lambda x: x.transpose(0, 1), "clone": lambda x: x.clone(), "add": lambda x: x + 1,
    "same": lambda x: x.view(x.shape), "reshape": lambda x: x.reshape(x.shape[1], x.shape[0]),
    "expand": lambda x: x.expand(x.shape),
}  # fmt: skip


@settings(max_examples=40)
@given(steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=8))
def test_any_chain_gives_the_same_numbers(steps: list[str]) -> None:
    def fn(x: Tensor) -> Tensor:
        for step in steps:
            x = STEPS[step](x)
        return x * 2

    x = torch.arange(6.0).view(2, 3)
    gm = functional(fn, x)
    before = gm(x)
    check_pass(PASS, gm, inputs=[x])
    assert torch.equal(gm(x), before)
