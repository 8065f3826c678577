"""insert_casts: the graph does what was decided, each cast right before the op that needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amp_compiler import Policy, ir
from amp_compiler.common.errors import PipelineError, VerifyError
from amp_compiler.passes.insert_casts import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.base import Context
from amp_compiler.rewrite.pipeline import Pipeline
from helpers import (
    BF16,
    F16,
    F32,
    LEVELS,
    casts,
    check_pass,
    context,
    find,
    ops,
    pre_dispatch,
    prepared,
    same,
    unchanged,
)

X, W, B = torch.randn(2, 4), torch.randn(4, 4), torch.randn(4)


def ready(
    fn: Any, *inputs: Any, ctx: Context | None = None, parameters: tuple[int, ...] = ()
) -> torch.fx.GraphModule:
    return prepared(
        pre_dispatch(fn, *inputs, parameters=parameters), ctx or context("O1"), until="insert_casts"
    )


def low_linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x.to(BF16), w.to(BF16), None if b is None else b.to(BF16))


# ------------------------------------------------------------------------------------------- smallest


def test_a_low_op_gets_its_casts_and_the_output_its_dtype() -> None:
    gm = ready(lambda x, w: F.linear(x, w), X, W)
    check_pass(PASS, gm, context("O1"), inputs=[X, W], reference=lambda x, w: low_linear(x, w).float(),
               modified=True, expected_text="""
        input x_1: f32[2, 4]
        input w_1: f32[4, 4]
        w_1_bf16: bf16[4, 4] = cast(w_1, bf16)
        x_1_bf16: bf16[2, 4] = cast(x_1, bf16)
        linear: bf16[2, 4] = linear(x_1_bf16, w_1_bf16)
        linear_f32: f32[2, 4] = cast(linear, f32)
        return linear_f32
    """)  # fmt: skip


def test_nothing_to_cast_nothing_changed() -> None:
    unchanged(PASS, ready(lambda x: x.exp().view(8) + 1, X), context("O1"), inputs=[X])
    ctx = context("O0")
    unchanged(PASS, ready(lambda x, w: F.linear(x, w).exp(), X, W, ctx=ctx), ctx, inputs=[X, W])


def test_each_cast_stands_right_before_its_consumer() -> None:
    gm = ready(lambda x, w: (F.linear(x, w) + 1, x.exp(), F.linear(x, w).sin(), x @ w), X, W)

    def reference(x: Tensor, w: Tensor) -> Any:
        y = low_linear(x, w).float()
        return y + 1, x.exp(), y.sin(), (x.to(BF16) @ w.to(BF16)).float()

    check_pass(PASS, gm, context("O1"), inputs=[X, W], reference=reference)
    for node in casts(gm):
        (user,) = node.users
        follower = node.next
        while ir.is_cast(follower):
            follower = follower.next
        assert user is follower, f"{node.name} stands before {follower.name}, not {user.name}"


def test_a_parameter_is_cast_once_before_its_first_use() -> None:
    gm = ready(lambda x, w: F.linear(F.linear(x, w), w), X, W, parameters=(1,))
    check_pass(PASS, gm, context("O1"), inputs=[X, W],
               reference=lambda x, w: low_linear(low_linear(x, w), w).float(), expected_text="""
        input x_1: f32[2, 4]
        input w_1: f32[4, 4]
        w_1_bf16: bf16[4, 4] = cast(w_1, bf16)
        x_1_bf16: bf16[2, 4] = cast(x_1, bf16)
        linear: bf16[2, 4] = linear(x_1_bf16, w_1_bf16)
        linear_1: bf16[2, 4] = linear(linear, w_1_bf16)
        linear_1_f32: f32[2, 4] = cast(linear_1, f32)
        return linear_1_f32
    """)  # fmt: skip


def test_an_input_that_is_no_parameter_is_cast_at_each_use() -> None:
    gm = ready(lambda x, w: F.linear(F.linear(x, w), w), X, W)
    check_pass(PASS, gm, context("O1"))
    assert len([n for n in casts(gm) if ir.cast_source(n).name == "w_1"]) == 2


def test_the_same_tensor_twice_in_one_op() -> None:
    gm = ready(lambda w: w @ w, W)
    check_pass(PASS, gm, context("O1"), inputs=[W], reference=lambda w: (w.to(BF16) @ w.to(BF16)).float())
    gm = ready(lambda w: w @ w, W, parameters=(0,))
    check_pass(PASS, gm, context("O1"), inputs=[W], reference=lambda w: (w.to(BF16) @ w.to(BF16)).float())
    assert len(casts(gm)) == 2


# --------------------------------------------------------------------------------------------- outputs


def test_outputs_are_restored_or_not() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        return y, {"again": y, "wide": x.exp()}, None, y.argmax(1), 7

    low = ready(fn, X, W)
    check_pass(PASS, low, context("O1", keep=False))
    result = low(X, W)
    assert [result[0].dtype, result[1]["again"].dtype, result[1]["wide"].dtype] == [BF16, BF16, F32]
    kept = ready(fn, X, W)
    check_pass(PASS, kept, context("O1"))
    result = kept(X, W)
    assert [result[0].dtype, result[1]["again"].dtype, result[1]["wide"].dtype] == [F32, F32, F32]
    assert result[2] is None
    assert result[4] == 7
    same(result[0], low_linear(X, W).float())


def test_a_model_that_gives_low_still_gives_low() -> None:
    gm = ready(lambda x, w: F.linear(x, w).to(F16), X, W)
    check_pass(PASS, gm, context("O1"), inputs=[X, W], reference=lambda x, w: low_linear(x, w).to(F16))


# ------------------------------------------------------------------------------------------- arguments


def test_none_and_scalar_arguments_stay() -> None:
    gm = ready(lambda x, w: torch.clamp(F.linear(x, w, None), None, 1.5) * 2, X, W, ctx=context("O2"))
    check_pass(PASS, gm, context("O2"), inputs=[X, W],
               reference=lambda x, w: (low_linear(x, w).clamp(None, 1.5) * 2).float())  # fmt: skip
    assert find(gm, "clamp").args[1:] == (None, 1.5)


def test_lists_of_tensors_are_cast_item_by_item() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([F.linear(x, w), x, F.linear(x, w)], 1)

    gm = ready(fn, X, W)

    def reference(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([low_linear(x, w).float(), x, low_linear(x, w).float()], 1)

    check_pass(PASS, gm, context("O1"), inputs=[X, W], reference=reference)
    (cat,) = ops(gm, "cat")
    assert [ir.tensor_of(a).dtype for a in cat.args[0]] == [F32] * 3


def test_indices_in_lists_with_none_are_left_alone() -> None:
    index = torch.tensor([1, 0])
    gm = ready(lambda x, w, i: F.linear(x, w)[:, i], X, W, index)
    check_pass(PASS, gm, context("O1"), inputs=[X, W, index],
               reference=lambda x, w, i: low_linear(x, w)[:, i].float())  # fmt: skip


@pytest.mark.parametrize("level", ["O1", "auto", "O2", "O3"])
def test_batch_norm_statistics_are_never_cast(level: str) -> None:
    x, mean, var = torch.randn(4, 4), torch.zeros(4), torch.ones(4)
    ctx = context(level)

    def fn(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(F.linear(x, w), mean, var, b, b, training=True)

    gm = ready(fn, x, W, B, mean, var, ctx=ctx)
    check_pass(PASS, gm, ctx)
    (norm,) = ops(gm, "batch_norm")
    assert [a.name for a in norm.args[1:5]] == ["b_1", "b_1", "mean_1", "var_1"]
    gm(x, W, B, mean, var)
    assert not torch.equal(mean, torch.zeros(4)), "the running statistics were not written"


def test_a_written_argument_is_never_cast() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x.clone()
        y.view(-1)[:4].addcmul_(F.linear(x, w)[0], x[0])
        return y

    gm = ready(fn, X, W)
    check_pass(PASS, gm, context("O1"))
    for node in gm.graph.nodes:
        assert not any(ir.is_cast(a) for name, a in ir.tensor_args(node) if name in ir.mutated_args(node))
    assert not torch.equal(gm(X, W), X)


def test_a_write_through_a_view_is_kept_next_to_fp64() -> None:
    """The op has an fp64 operand and a low target: casting the target would lose the write."""
    wide = torch.full((8,), 100.0, dtype=torch.float64)

    def fn(x: Tensor, w: Tensor, d: Tensor) -> Tensor:
        y = F.linear(x, w)
        y.view(-1).add_(d)
        return y

    gm = ready(fn, X, W, wide)
    check_pass(PASS, gm, context("O1"), inputs=[X, W, wide],
               reference=lambda x, w, d: low_linear(x, w).view(-1).add_(d).view(2, 4).float())  # fmt: skip


def test_kept_ops_get_back_what_they_were_traced_with() -> None:
    gm = ready(lambda x, w: torch.bucketize(F.linear(x, w), x[0]), X, W)
    check_pass(PASS, gm, context("O1"))
    gm = ready(lambda x, w: F.linear(x, w).frexp()[0], X, W)  # KEEP: takes a number of the dtype apart
    check_pass(
        PASS, gm, context("O1"), inputs=[X, W], reference=lambda x, w: low_linear(x, w).float().frexp()[0]
    )


def test_multiple_outputs_have_their_new_dtypes() -> None:
    gm = ready(lambda x, w: F.linear(x, w).split(2, 1), X, W)
    check_pass(PASS, gm, context("O1"), inputs=[X, W],
               reference=lambda x, w: [p.float() for p in low_linear(x, w).split(2, 1)])  # fmt: skip
    assert [v.dtype for v in find(gm, "split").meta["val"]] == [BF16, BF16]


def test_bodies_of_cond_are_rewritten_and_keep_their_border() -> None:
    def fn(p: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(p, lambda x, w: (F.linear(x, w),), lambda x, w: (x * 2,), (x, w))[0]

    args = (torch.tensor(True), X, W)
    gm = ready(fn, *args)
    check_pass(
        PASS,
        gm,
        context("O1"),
        inputs=args,
        reference=lambda p, x, w: low_linear(x, w).float(),
        modified=True,
    )
    bodies = [inner for name, inner in ir.all_graphs(gm) if name]
    assert [len(casts(b)) for b in bodies] == [3, 0]


# ------------------------------------------------------------------------------------------ requirements


def test_a_violated_requirement_is_named() -> None:
    with pytest.raises(VerifyError, match=r"node 'linear'.*has no precision"):
        check_pass(PASS, pre_dispatch(lambda x, w: F.linear(x, w), X, W))
    with pytest.raises(PipelineError, match=r"'insert_casts' needs 'assigned'.*'assign_precision' ensures it"):
        Pipeline((PASS,), (facts.CAPTURED, facts.NORMALIZED))


# ---------------------------------------------------------------------------------------------- property

OPS: dict[str, Any] = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "add": lambda x, w: x + w[:2],
    "scale": lambda x, w: x * 0.5,
    "relu": lambda x, w: x.relu(),
    "softmax": lambda x, w: x.softmax(-1),
    "norm": lambda x, w: F.layer_norm(x, (4,), w[0], None),
    "exp": lambda x, w: x.clamp(-2, 2).exp(),
    "cat": lambda x, w: torch.cat([x, w[:2]])[1:3],
    "split": lambda x, w: sum(x.split(2, 1)).repeat(1, 2),
    "half": lambda x, w: x.half(),
    "wide": lambda x, w: x.float(),
    "inplace": lambda x, w: (x * 1).add_(1),
    "index": lambda x, w: x[:, torch.tensor([3, 2, 1, 0])],
    "double": lambda x, w: (x.double() * 2).float(),
}


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=6),
    st.sampled_from(LEVELS),
    st.sampled_from([BF16, F16]),
)
def test_any_program_is_consistent_and_near_the_fp32_one(
    steps: list[str], level: str, dtype: torch.dtype
) -> None:
    x, w = torch.linspace(-1, 1, 8).view(2, 4), torch.linspace(-0.5, 0.6, 16).view(4, 4)
    ctx = context(policy=Policy(level, dtype))

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x
        for step in steps:
            y = OPS[step](y if step == "half" else y.float(), w)
        return y

    gm = ready(fn, x, w, ctx=ctx, parameters=(1,))
    expected = fn(x, w)
    check_pass(PASS, gm, ctx)
    got = gm(x, w)
    assert got.dtype == expected.dtype
    # the low dtype's rounding, once for each of at most six steps that double an error at most
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=0.6 if dtype is BF16 else 0.1)


def test_a_cast_that_comes_out_empty_still_says_what_the_model_gives() -> None:
    """``fc(x).to(torch.bfloat16)`` at bf16 casts nothing, and is still a bf16 output, and a bf16 input of a loss."""

    def fn(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w).to(torch.bfloat16)
        return y, y.softmax(-1)

    gm = prepared(pre_dispatch(fn, torch.randn(2, 4), torch.randn(3, 4)), context("O2", BF16), until="insert_casts")
    check_pass(PASS, gm, context("O2", BF16))
    assert [v.dtype for v in gm(torch.randn(2, 4), torch.randn(3, 4))] == [BF16, BF16]


# ------------------------------------------------------------------------------- inputs that another graph made low


def with_low_input(fn: Any, *inputs: Any, ctx: Context) -> torch.fx.GraphModule:
    gm = pre_dispatch(fn, *inputs)
    next(iter(gm.graph.nodes)).meta[ir.LOW_INPUT] = BF16
    return prepared(gm, ctx, until="insert_casts")


def test_an_input_that_another_graph_made_low_is_low_here() -> None:
    """As in one graph, what follows it is low; the cast gives back the values that it had there."""
    ctx = context("O2")
    gm = with_low_input(lambda x: torch.relu(x) * 2, X.to(BF16).float(), ctx=ctx)
    check_pass(PASS, gm, ctx, inputs=[X.to(BF16).float()], reference=lambda x: (torch.relu(x.to(BF16)) * 2).float(),
               modified=True, expected_text="""
        input x_1: f32[2, 4]
        x_1_low: bf16[2, 4] = cast(x_1, bf16)
        relu: bf16[2, 4] = relu(x_1_low)
        mul: bf16[2, 4] = mul.Tensor(relu, 2)
        mul_f32: f32[2, 4] = cast(mul, f32)
        return mul_f32
        """)  # fmt: skip


def test_an_input_that_counts_as_low_is_widened_for_an_fp32_op() -> None:
    ctx = context("O1")
    x = X.to(BF16).float()
    gm = with_low_input(lambda x: torch.softmax(x, -1), x, ctx=ctx)
    check_pass(PASS, gm, ctx, inputs=[x], reference=lambda x: torch.softmax(x, -1), modified=True)
    assert gm.graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)[0].meta["val"].dtype is F32
