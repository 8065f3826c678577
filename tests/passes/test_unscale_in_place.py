"""unscale_in_place and accumulate_in_place: the same numbers in fewer bytes, and nobody else's memory is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from amp_compiler import ir
from amp_compiler.common.errors import PipelineError, VerifyError
from amp_compiler.passes import accumulate_in_place, scale_loss, unscale_in_place
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.verify import verify
from helpers import BF16, F16, check_pass, context, step_graph
from helpers import run_step as run

SCALE = 1024.0


def scaled(fn: Any, *inputs: Tensor) -> fx.GraphModule:
    gm = step_graph(fn, *inputs)
    scale_loss.PASS.run(gm, context())
    return gm


def gradients(result: dict[ir.Role, Tensor]) -> dict[int, Tensor]:
    return {role.index: value for role, value in result.items() if role.kind == "gradient"}


def dense(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return (x.to(BF16) @ w.to(BF16) + b.to(BF16)).float().pow(2).mean()


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True), torch.randn(4, 3)]


def same(a: dict[int, Tensor], b: dict[int, Tensor]) -> None:
    assert a.keys() == b.keys()
    for index in a:
        assert torch.equal(a[index], b[index]), index


def test_low_gradients_are_widened_where_they_are_made() -> None:
    inputs = leaves()
    before = run(scaled(dense, *inputs), *inputs)
    gm = check_pass(unscale_in_place.PASS, scaled(dense, *inputs), modified=True)
    same(gradients(run(gm, *inputs)), gradients(before))
    nodes = list(gm.graph.nodes)
    (op,) = [n for n in nodes if ir.op_name(n) == "amp::unscale_"]
    widened = [n for n in op.args[0] if ir.is_float_cast(n)]
    assert len(widened) == 2
    for cast in widened:
        assert nodes.index(cast) == nodes.index(ir.cast_source(cast)) + 1


def expanded(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return w.sum() + b.sum()


def one_tensor_for_two(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return (w[0] * 2 + b * 2).sum() + (w[0] + b).pow(2).sum()


def the_tangent_itself(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return w[0, 0] + b[0]


@pytest.mark.parametrize("fn", [expanded, one_tensor_for_two, the_tangent_itself])
def test_shared_memory_is_cloned_first(fn: Any) -> None:
    inputs = leaves()
    expected = torch.autograd.grad(fn(*inputs), inputs[:2])
    gm = check_pass(unscale_in_place.PASS, scaled(fn, *inputs), modified=True)
    result = gradients(run(gm, *inputs))
    assert all(torch.equal(result[i], expected[i]) for i in result)
    assert len({x.untyped_storage().data_ptr() for x in result.values()}) == len(result)


def test_results_of_a_normalization_are_separate() -> None:
    def fn(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (2,), w, b).pow(3).sum()

    inputs = [torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True), torch.randn(4, 2)]
    before = gradients(run(scaled(fn, *inputs), *inputs))
    gm = check_pass(unscale_in_place.PASS, scaled(fn, *inputs), modified=True)
    (op,) = [n for n in gm.graph.nodes if ir.op_name(n) == "amp::unscale_"]
    assert not any(ir.op_name(gradient) == "clone" for gradient in op.args[0])
    same(gradients(run(gm, *inputs)), before)


def test_one_result_for_two_parameters_is_cloned() -> None:
    def fn(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (2,), w + b).pow(3).sum()

    inputs = [torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True), torch.randn(4, 2)]
    gm = check_pass(unscale_in_place.PASS, scaled(fn, *inputs), modified=True)
    result = gradients(run(gm, *inputs))
    assert torch.equal(result[0], result[1])
    assert result[0].data_ptr() != result[1].data_ptr()


def test_a_bare_scalar_parameter() -> None:
    """Its gradient is the tangent: an input, which must not be written to."""
    w = torch.tensor(3.0, requires_grad=True)
    gm = check_pass(unscale_in_place.PASS, scaled(lambda w: w * 1, w), modified=True)
    assert float(gradients(run(gm, w))[0]) == 1.0


@pytest.mark.parametrize("pass_", [unscale_in_place.PASS, accumulate_in_place.PASS])
def test_a_low_parameter_is_left_alone(pass_: Any) -> None:
    w = torch.ones(3, dtype=F16, requires_grad=True)
    check_pass(pass_, scaled(lambda w: (w * 3).float().sum(), w), modified=False)


def test_sums_grow_where_gradients_are_made() -> None:
    inputs = leaves()
    plain = gradients(run(scaled(dense, *inputs), *inputs))
    gm = check_pass(accumulate_in_place.PASS, scaled(dense, *inputs), modified=True)
    sums = {0: torch.ones(3, 2), 1: torch.zeros(2)}
    result = run(gm, *inputs, sums=sums)
    assert gradients(result) == {}
    assert torch.equal(sums[0], plain[0] + 1)
    assert torch.equal(sums[1], plain[1])
    assert result[ir.Role("found")].tolist() == [0.0]


def test_the_flag_looks_at_the_sums() -> None:
    inputs = leaves()
    gm = check_pass(accumulate_in_place.PASS, scaled(dense, *inputs), modified=True)
    sums = {0: torch.full((3, 2), float("nan")), 1: torch.zeros(2)}  # an earlier micro-batch, or the user
    assert run(gm, *inputs, sums=sums)[ir.Role("found")].tolist() == [1.0]


@settings(max_examples=15)
@given(power=st.integers(-8, 12), seed=st.integers(0, 50), low=st.sampled_from([BF16, torch.float32]))
def test_both_give_the_functional_graphs_bits(power: int, seed: int, low: torch.dtype) -> None:
    torch.manual_seed(seed)
    inputs = [torch.randn(3, 2, requires_grad=True) * 2.0**power, torch.randn(2), torch.randn(4, 3)]
    inputs = [inputs[0].detach().requires_grad_(), inputs[1].requires_grad_(), inputs[2]]

    def fn(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return (x.to(low) @ w.to(low) + b.to(low)).float().tanh().mean()

    plain = gradients(run(scaled(fn, *inputs), *inputs))
    one, many = scaled(fn, *inputs), scaled(fn, *inputs)
    unscale_in_place.PASS.run(one, context())
    accumulate_in_place.PASS.run(many, context())
    same(gradients(run(one, *inputs)), plain)
    sums = {0: torch.zeros(3, 2), 1: torch.zeros(2)}
    run(many, *inputs, sums=sums)
    same(sums, plain)


def test_they_need_a_scaled_graph() -> None:
    with pytest.raises(PipelineError, match="needs 'scaled'"):
        Pipeline((unscale_in_place.PASS,), (facts.FUNCTIONAL, facts.STEP))


def test_the_verifier_finds_memory_of_somebody_else() -> None:
    gm = scaled(dense, *leaves())
    unscale_in_place.PASS.run(gm, context())
    (op,) = [n for n in gm.graph.nodes if ir.op_name(n) == "amp::unscale_"]
    op.args = ([op.args[0][0], op.args[0][0]], *op.args[1:])
    with pytest.raises(VerifyError, match="unscales"):
        verify(gm, (facts.IN_PLACE,), context(), "the damage")


def test_the_verifier_finds_a_sum_that_is_not_unscaled() -> None:
    gm = scaled(dense, *leaves())
    accumulate_in_place.PASS.run(gm, context())
    add = next(n for n in gm.graph.nodes if ir.op_name(n) == "addcmul_")
    add.args = (add.args[0], add.args[1], next(n for n in gm.graph.nodes if n.name == "scale"))
    with pytest.raises(VerifyError, match="not unscaled"):
        verify(gm, (facts.ACCUMULATED,), context(), "the damage")
