"""scale_loss: the gradients are those of the plain backward, whatever the scale; one flag; old or new state."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from amp_compiler import ir
from amp_compiler.common.errors import PipelineError, VerifyError
from amp_compiler.passes.scale_loss import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.verify import verify
from helpers import BF16, F16, F32, aten, check_pass, context, step_graph


def leaf(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))
    return values.to(dtype).requires_grad_()


def run(
    gm: fx.GraphModule, inputs: list[Tensor], scale: float = 1.0, found: float = 0.0, saved: Any = None
) -> dict[ir.Role, Any]:
    """Run a scaled graph: outputs by role."""
    values = {"tangent": torch.ones(()), "scale": torch.tensor(scale), "found": torch.tensor([found])}
    given_ = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            role = node.meta[ir.ROLE]
            if role.kind == "primal":
                given_.append(inputs[role.index].detach())
            else:
                given_.append(saved[role.index] if role.kind == "saved" else values[role.kind])
    return dict(zip(gm.meta[ir.ROLE], gm(*given_), strict=True))


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x.to(BF16) @ w.to(BF16)).float().pow(2).mean()


def test_the_smallest_step() -> None:
    w = leaf(2)
    check_pass(PASS, step_graph(lambda w: w.sum(), w), modified=True, expected_text="""
        input p0: f32[2]
        input tangents_1: f32[]
        input scale: f32[]
        input found: f32[1]
        sum_1: f32[] = sum(p0)
        clone_default: f32[] = clone(sum_1)
        mul_tensor: f32[] = mul.Tensor(tangents_1, scale)
        expand: f32[2] = expand(mul_tensor, [2])
        reciprocal_default: f32[] = reciprocal(scale)
        unscale_default: ((f32[2]), f32[1]) = unscale([expand], reciprocal_default, found)
        getitem: (f32[2]) = getitem(unscale_default, 0)
        grad_p0: f32[2] = getitem(getitem, 0)
        getitem_2: f32[1] = getitem(unscale_default, 1)
        return clone_default, grad_p0, getitem_2
    """)  # fmt: skip


def test_a_low_gradient_is_widened_by_the_unscale_itself() -> None:
    w, x = leaf(3, 2), torch.randn(4, 3)
    gm = check_pass(PASS, step_graph(loss, w, x), modified=True)
    (op,) = [n for n in gm.graph.nodes if ir.op_name(n) == "amp::unscale"]
    assert [n.meta["val"].dtype for n in op.args[0]] == [BF16]
    result = run(gm, [w, x], scale=2.0**10)
    (expected,) = torch.autograd.grad(loss(w, x), [w])
    assert torch.equal(result[ir.Role("gradient", 0)], expected)
    assert result[ir.Role("gradient", 0)].dtype is F32


def test_a_low_parameter_gets_a_low_gradient() -> None:
    w = leaf(3, dtype=F16)
    gm = check_pass(PASS, step_graph(lambda w: (w * 3).float().sum(), w), modified=True)
    assert run(gm, [w], scale=8.0)[ir.Role("gradient", 0)].tolist() == [3.0, 3.0, 3.0]
    assert run(gm, [w], scale=8.0)[ir.Role("gradient", 0)].dtype is F16


def test_what_would_underflow_survives() -> None:
    """1e-9 is nothing in fp16, 1e-9 · 65536 is something."""
    w = leaf(2)
    gm = check_pass(PASS, step_graph(lambda w: (w.half() * 1).float().mul(1e-9).sum(), w), modified=True)
    assert run(gm, [w], scale=1.0)[ir.Role("gradient", 0)].tolist() == [0.0, 0.0]
    scaled = run(gm, [w], scale=2.0**16)[ir.Role("gradient", 0)]
    torch.testing.assert_close(scaled, torch.full((2,), 1e-9), rtol=2**-10, atol=0)  # fp16 rounds by at most that


@pytest.mark.parametrize(("before", "bad", "after"), [(0.0, False, 0.0), (0.0, True, 1.0), (1.0, False, 1.0)])
def test_the_flag(before: float, bad: bool, after: float) -> None:
    w = leaf(2)
    x = torch.tensor([float("inf"), 1.0]) if bad else torch.ones(2)
    gm = check_pass(PASS, step_graph(lambda w, x: (w * x).sum(), w, x), modified=True)
    assert run(gm, [w, x], found=before)[ir.Role("found")].tolist() == [after]


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_state_is_old_or_new(found: float) -> None:
    def fn(w: Tensor, count: Tensor, mean: Tensor) -> Tensor:
        count.add_(1)
        mean.mul_(0.5)
        return (w * mean).sum()

    inputs = [leaf(2), torch.tensor(3), torch.ones(2)]
    gm = check_pass(PASS, step_graph(fn, *inputs, state=[1, 2]), modified=True)
    result = run(gm, inputs, found=found, saved={1: torch.tensor(1), 2: torch.full((2,), 7.0)})
    assert result[ir.Role("mutation", 1)].tolist() == (1 if found else 4)
    assert result[ir.Role("mutation", 2)].tolist() == ([7.0, 7.0] if found else [0.5, 0.5])


def test_state_is_new_if_the_step_restores_it() -> None:
    def fn(w: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return (w * 2).sum()

    inputs = [leaf(2), torch.tensor(3)]
    graph = step_graph(fn, *inputs, state=[1])
    gm = check_pass(PASS, graph, dataclasses.replace(context(), restores_outside=True), modified=True)
    assert run(gm, inputs, found=1.0)[ir.Role("mutation", 1)].tolist() == 4


def test_what_is_the_users_is_not_restored() -> None:
    def fn(w: Tensor, batch: Tensor) -> Tensor:
        batch.add_(1)
        return (w * batch).sum()

    inputs = [leaf(2), torch.zeros(2)]
    gm = check_pass(PASS, step_graph(fn, *inputs, state=[]), modified=True)
    assert run(gm, inputs, found=1.0)[ir.Role("mutation", 1)].tolist() == [1.0, 1.0]


def test_shared_and_unused_parameters() -> None:
    inputs = [leaf(3, 3), leaf(2), torch.randn(4, 3)]
    gm = check_pass(PASS, step_graph(lambda w, unused, x: ((x @ w) @ w).sum(), *inputs), modified=True)
    assert [r.index for r in gm.meta[ir.ROLE] if r.kind == "gradient"] == [0]
    (expected,) = torch.autograd.grad(((inputs[2] @ inputs[0]) @ inputs[0]).sum(), inputs[:1])
    assert torch.equal(run(gm, inputs, scale=512.0)[ir.Role("gradient", 0)], expected)


def test_requires_a_training_step() -> None:
    with pytest.raises(PipelineError, match="needs 'step'"):
        Pipeline((PASS,), (facts.FUNCTIONAL,))


@settings(max_examples=25)
@given(power=st.integers(-20, 30), wide=st.booleans(), seed=st.integers(0, 100))
def test_any_power_of_two_gives_the_same_gradient(power: int, wide: bool, seed: int) -> None:
    torch.manual_seed(seed)
    w, x = torch.randn(3, 2, requires_grad=True), torch.randn(4, 3)
    low = F32 if wide else BF16  # bf16 has fp32's range: a power of two moves no bit

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return (x.to(low) @ w.to(low)).float().tanh().mean()

    gm = step_graph(fn, w, x)
    PASS.run(gm, context())
    plain, scaled = run(gm, [w, x]), run(gm, [w, x], scale=2.0**power)
    assert torch.equal(plain[ir.Role("gradient", 0)], scaled[ir.Role("gradient", 0)])
    assert torch.equal(plain[ir.Role("output", 0)], scaled[ir.Role("output", 0)])


# ------------------------------------------------------------------------------ what the verifier proves


def scaled_graph() -> fx.GraphModule:
    gm = step_graph(loss, leaf(3, 2), torch.randn(4, 3))
    PASS.run(gm, context())
    return gm


def node(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in gm.graph.nodes if ir.op_name(n) == name or n.name == name)


def scaled_twice(gm: fx.GraphModule) -> None:
    tangent = node(gm, "mul_tensor")
    reader = next(u for u in tangent.users)
    with gm.graph.inserting_before(reader):
        again = gm.graph.call_function(aten.mul.Tensor, (tangent, node(gm, "scale")))
    again.meta["val"] = tangent.meta["val"]
    reader.replace_input_with(tangent, again)


def not_scaled(gm: fx.GraphModule) -> None:
    node(gm, "mul_tensor").replace_all_uses_with(node(gm, "tangents_1"))


def not_unscaled(gm: fx.GraphModule) -> None:
    last = next(iter(reversed(gm.graph.nodes)))
    op = node(gm, "amp::unscale")
    last.args = (tuple(op.args[0][0] if n.name.startswith("grad_") else n for n in last.args[0]),)


def unscaled_twice(gm: fx.GraphModule) -> None:
    gradient, op = node(gm, "grad_p0"), node(gm, "amp::unscale")
    with gm.graph.inserting_after(gradient):
        again = gm.graph.call_function(torch.ops.amp.unscale.default, ([gradient], op.args[1], op.args[2]))
    with gm.graph.inserting_after(again):
        first = gm.graph.call_function(operator.getitem, (again, 0))
    with gm.graph.inserting_after(first):
        second = gm.graph.call_function(operator.getitem, (first, 0))
    gradient.replace_all_uses_with(second, delete_user_cb=lambda user: user.op == "output")


def half_scaled(gm: fx.GraphModule) -> None:
    """A gradient with one scaled and one plain path from the loss."""
    op = node(gm, "amp::unscale")
    given_ = op.args[0][0]
    with gm.graph.inserting_before(op):
        plain = gm.graph.call_function(aten.mul.Tensor, (given_, node(gm, "tangents_1")))
    op.args = ([plain], *op.args[1:])


def loss_depends_on_scale(gm: fx.GraphModule) -> None:
    last = next(iter(reversed(gm.graph.nodes)))
    with gm.graph.inserting_before(last):
        wrong = gm.graph.call_function(aten.mul.Tensor, (last.args[0][0], node(gm, "scale")))
    last.args = ((wrong, *last.args[0][1:]),)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (scaled_twice, "uses the scale for something other"),
        (not_scaled, "before it is scaled"),
        (not_unscaled, "1 times scaled and 0 times unscaled"),
        (unscaled_twice, "1 times scaled and 2 times unscaled"),
        (half_scaled, "before it is scaled"),
        (loss_depends_on_scale, "uses the scale for something other"),
    ],
)
def test_the_verifier_finds(damage: Any, message: str) -> None:
    gm = scaled_graph()
    verify(gm, (facts.SCALED,), context(), "scale_loss")
    damage(gm)
    with pytest.raises(VerifyError, match=message):
        verify(gm, (facts.SCALED,), context(), "the damage")
