"""widen_gradients: gradients of low-precision parameters leave the graph in fp32, as those of an fp32 model do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from amp_compiler import ir
from amp_compiler.common.errors import PipelineError
from amp_compiler.passes import scale_loss
from amp_compiler.passes.widen_gradients import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from helpers import BF16, F16, F32, check_pass, context, ops, step_graph

CTX = dataclasses.replace(context(), updates_in_fp32=True)


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return values.to(dtype).requires_grad_()


def gradients(gm: fx.GraphModule, *inputs: Tensor) -> list[Tensor]:
    """The gradients that a graph without a loss scale returns."""
    given_ = [inputs[n.meta[ir.ROLE].index].detach() if n.meta[ir.ROLE].kind == "primal" else torch.ones(())
              for n in gm.graph.nodes if n.op == "placeholder"]  # fmt: skip
    return [value for role, value in zip(gm.meta[ir.ROLE], gm(*given_), strict=True) if role.kind == "gradient"]


def test_the_smallest_step() -> None:
    w = leaf(2)
    check_pass(PASS, step_graph(lambda w: (w * 3).float().sum(), w), CTX, modified=True, expected_text="""
        input p0: bf16[2]
        input tangents_1: f32[]
        mul: bf16[2] = mul.Tensor(p0, 3)
        _to_copy: f32[2] = cast(mul, f32)
        sum_1: f32[] = sum(_to_copy)
        clone_default: f32[] = clone(sum_1)
        expand: f32[2] = expand(tangents_1, [2])
        _to_copy_1: bf16[2] = cast(expand, bf16)
        mul_1: bf16[2] = mul.Tensor(_to_copy_1, 3)
        _to_copy_default: f32[2] = cast(mul_1, f32)
        return clone_default, _to_copy_default
    """)


def test_parameters_in_fp32_and_fp64_stay_as_they_are() -> None:
    for dtype in (F32, torch.float64):
        check_pass(PASS, step_graph(lambda w: (w.to(BF16) * 3).float().sum(), leaf(2, dtype=dtype)), CTX,
                   modified=False)  # fmt: skip


def test_the_uses_of_one_parameter_are_added_in_fp32() -> None:
    """As in an fp32 model, where each use has a cast of its own."""
    w, x = leaf(3, 3), torch.randn(2, 3).to(BF16)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return ((x @ w) @ w.t()).float().sum()

    gm = check_pass(PASS, step_graph(loss, w, x), CTX, modified=True)
    wide = w.detach().float().requires_grad_()
    reference = step_graph(lambda w, x: ((x @ w.to(BF16)) @ w.to(BF16).t()).float().sum(), wide, x)
    assert torch.equal(gradients(gm, w, x)[0], gradients(reference, wide, x)[0])
    assert len(ops(gm, "add")) == 1


def test_an_embedding_sums_its_rows_in_fp32() -> None:
    """bf16 counts to 256: 300 uses of a row would give 256."""
    w, rows = leaf(2, 3), torch.zeros(300, dtype=torch.int64)
    gm = check_pass(PASS, step_graph(lambda w, x: F.embedding(x, w).float().sum(), w, rows), CTX, modified=True)
    assert torch.equal(gradients(gm, w, rows)[0], torch.tensor([[300.0] * 3, [0.0] * 3]))


def test_a_gradient_that_something_else_reads_is_only_cast() -> None:
    """One sum of two uses is the gradient of two parameters: it stays one sum."""
    a, b = leaf(2), leaf(2)
    gm = check_pass(PASS, step_graph(lambda a, b: ((a + b) * 3 + (a + b) * 5).float().sum(), a, b), CTX, modified=True)
    assert [value.dtype for value in gradients(gm, a, b)] == [F32, F32]


def test_unscaled_without_rounding() -> None:
    """A gradient that fp16 cannot hold once it is unscaled."""
    w = leaf(2, dtype=F16)
    gm = step_graph(lambda w: (w * 1).float().mul(1e-9).sum(), w)
    check_pass(PASS, gm, CTX, modified=True)
    check_pass(scale_loss.PASS, gm, CTX, modified=True)
    values: dict[str, Any] = {"tangent": torch.ones(()), "scale": torch.tensor(2.0**16), "found": torch.zeros(1)}
    inputs = [w.detach() if n.meta[ir.ROLE].kind == "primal" else values[n.meta[ir.ROLE].kind]
              for n in gm.graph.nodes if n.op == "placeholder"]  # fmt: skip
    gradient = next(v for role, v in zip(gm.meta[ir.ROLE], gm(*inputs), strict=True) if role.kind == "gradient")
    assert gradient.dtype == F32
    assert torch.allclose(gradient, torch.full((2,), 1e-9), rtol=2.0**-10)


def test_it_is_left_out_for_fp32_models() -> None:
    assert PASS.unmet(context()) == "low-precision parameters that are updated in fp32"
    assert not PASS.is_asked(context())


def test_requires_a_training_step() -> None:
    with pytest.raises(PipelineError, match="step"):
        Pipeline((PASS,), (facts.FUNCTIONAL,))


@settings(max_examples=6)
@given(st.sampled_from([BF16, F16]), st.integers(1, 4), st.integers(0, 99))
def test_never_further_from_the_true_gradient(dtype: torch.dtype, uses: int, seed: int) -> None:
    """Rounding less often, the sum over a parameter's uses is not worse than the low-precision one, as a whole."""
    source = torch.Generator().manual_seed(seed)
    w = torch.randn(4, generator=source).to(dtype).requires_grad_()
    factors = torch.randn(uses, 4, generator=source).to(dtype)

    def loss(w: Tensor, factors: Tensor) -> Tensor:
        return torch.stack([w * factors[i] for i in range(uses)]).float().sum()

    low = gradients(step_graph(loss, w, factors), w, factors)[0].double()
    gm = step_graph(loss, w, factors)
    check_pass(PASS, gm, CTX, modified=True)
    wide = gradients(gm, w, factors)[0].double()
    exact = factors.double().sum(0)
    assert float((wide - exact).abs().max()) <= float((low - exact).abs().max())
