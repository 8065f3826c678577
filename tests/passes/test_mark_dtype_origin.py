"""mark_dtype_origin on graphs of a few nodes: the same function traced in fp32 and in the low dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from amp_compiler import ir, precision
from amp_compiler.common.errors import VerifyError
from amp_compiler.ir import Origin
from amp_compiler.passes import mark_dtype_origin, normalize
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.base import Context
from amp_compiler.rewrite.verify import verify
from helpers import BF16, F16, F32, LOW, check_pass, context, find, ops, pre_dispatch, unchanged

PASS = mark_dtype_origin.PASS
X, Y = torch.randn(2, 4), torch.randn(2, 4)


def beside_its_twin(fn: Callable[..., Any], *inputs: Tensor, low: torch.dtype = BF16) -> tuple[fx.GraphModule, Context]:
    """The function's graph, normalized, and a context that holds its twin."""
    twin = pre_dispatch(fn, *(x.to(low) if x.dtype is F32 else x for x in inputs))
    gm = pre_dispatch(fn, *inputs)
    ctx = replace(context("O2", low), twin=twin)
    normalize.PASS.run(gm, ctx)
    return gm, ctx


def marked(fn: Callable[..., Any], *inputs: Tensor, low: torch.dtype = BF16, text: str | None = None) -> Any:
    gm, ctx = beside_its_twin(fn, *inputs, low=low)
    check_pass(PASS, gm, ctx, text, inputs=inputs)
    return gm, ctx.notes


def verdicts(gm: fx.GraphModule, op: str = "to") -> list[bool]:
    return [n.meta[ir.ORIGIN].follows for n in ops(gm, op)]


def test_explicit_and_followed_casts_are_told_apart() -> None:
    gm, notes = marked(lambda x, y: x.to(torch.float32).exp().to(y.dtype), X, Y)
    assert verdicts(gm) == [False, True]
    assert [n.meta[ir.ORIGIN].twin for n in ops(gm, "to")] == [F32, BF16]
    assert notes == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x.exp().float(),
        lambda x, y: x.to(torch.bfloat16).float(),  # a rounding that the author wants
        lambda x, y: x.double().to(torch.float32),
        lambda x, y: torch.softmax(x, -1, dtype=torch.float32),
        lambda x, y: x + torch.zeros(4, dtype=torch.float32),
        lambda x, y: (x > y).to(torch.float32),
        lambda x, y: x * -3.4e38,
    ],
)
def test_near_misses_are_explicit(fn: Any) -> None:
    gm, _ = marked(fn, X, Y)
    assert not any(known.follows or known.numbers for n in gm.graph.nodes if (known := ir.origin(n)) is not None)


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda x, y: x.type_as(y) * 2, "to"),
        (lambda x, y: x.to(y) * 2, "to"),
        (lambda x, y: (x > y).to(x.dtype), "to"),
        (lambda x, y: torch.softmax(x, -1, dtype=y.dtype), "softmax"),
        (lambda x, y: x + torch.zeros(4, dtype=x.dtype), "zeros"),
        (lambda x, y: x + torch.full((4,), 2.0, dtype=x.dtype), "full"),
        (lambda x, y: x + torch.arange(4, dtype=x.dtype), "arange"),
        (lambda x, y: x.sum(-1, dtype=x.dtype), "sum"),
    ],
)
def test_every_way_to_follow(fn: Any, op: str) -> None:
    gm, _ = marked(fn, X, Y)
    assert verdicts(gm, op) == [True]


def test_the_tensor_that_was_asked_is_named() -> None:
    gm, _ = marked(lambda x, y: (x * 2).type_as(y) + (x * 3).type_as(x), X, Y)
    assert [n.meta[ir.ORIGIN].of for n in ops(gm, "to")] == ["y_1", "x_1"]


@pytest.mark.parametrize("low", LOW)
def test_limits_of_a_dtype(low: torch.dtype) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        info = torch.finfo(x.dtype)
        return x.masked_fill(y > 0, info.min).clamp(info.eps, info.max - 1000) * 3

    gm, _ = marked(fn, X, Y, low=low)
    info = torch.finfo(low)
    (fill,), (clamp,), (mul,) = ops(gm, "masked_fill"), ops(gm, "clamp"), ops(gm, "mul")
    assert fill.meta[ir.ORIGIN].numbers == (("value", info.min),)
    assert clamp.meta[ir.ORIGIN].numbers == (("min", info.eps), ("max", info.max - 1000))
    assert mul.meta[ir.ORIGIN].numbers == ()


def test_a_constant_of_one_value_is_spelled_out() -> None:
    gm, _ = marked(lambda x: torch.maximum(x, torch.tensor(torch.finfo(x.dtype).min, dtype=x.dtype)), X, low=F16)
    (full,) = ops(gm, "full")
    assert full.args == ([], torch.finfo(F32).min)
    assert full.meta[ir.ORIGIN] == Origin(True, F16, (("fill_value", torch.finfo(F16).min),))


def test_a_constant_of_several_values_is_not() -> None:
    gm, _ = marked(lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype), X)
    assert not ops(gm, "full")


def test_a_cast_that_fp32_skips_is_added() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = x.float().exp()
        if z.dtype != y.dtype:
            z = z.to(y.dtype)
        return z * y

    gm, notes = marked(
        fn, X, Y,
        text="""
            input x_1: f32[2, 4]
            input y_1: f32[2, 4]
            to: f32[2, 4] = cast(x_1, f32)
            exp: f32[2, 4] = exp(to)
            to_dtype: f32[2, 4] = cast(exp, f32)
            mul: f32[2, 4] = mul.Tensor(to_dtype, y_1)
            return mul
        """,
    )  # fmt: skip
    assert verdicts(gm) == [False, True]
    assert notes == []


def test_shared_users_get_the_value_that_they_use_in_the_twin() -> None:
    """``y = x.float()`` is x itself in fp32, and a tracer takes later uses of x for uses of y."""

    def fn(x: Tensor) -> Any:
        y = x.float()
        return x * 2, y * 3, x * 4

    gm, ctx = beside_its_twin(fn, X)
    cast = ops(gm, "to")[0]
    for node in ops(gm, "mul"):  # as torch.export writes it
        node.args = (cast, node.args[1])
    check_pass(PASS, gm, ctx, inputs=[X])
    assert [n.args[0].op for n in ops(gm, "mul")] == ["placeholder", "call_function", "placeholder"]


def test_code_of_the_low_dtype_alone_keeps_what_it_guards_in_fp32() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = x * y
        if z.dtype == torch.float16:
            z = torch.where(z.isinf(), 0.0, z).clamp(-9, 9)
        return z + 1

    gm, notes = marked(fn, X, Y, low=F16)
    assert "only in float16" in find(gm, "mul").meta[ir.ORIGIN].unsure
    assert not find(gm, "add").meta[ir.ORIGIN].unsure
    assert len(notes) == 1
    gm, notes = marked(fn, X, Y, low=BF16)
    assert not find(gm, "mul").meta[ir.ORIGIN].unsure
    assert notes == []


def test_code_of_fp32_alone_stays_fp32() -> None:
    gm, notes = marked(lambda x: (x * 2 if x.dtype == torch.float32 else x) + 1, X)
    assert "a different path" in find(gm, "mul").meta[ir.ORIGIN].unsure
    assert not find(gm, "add").meta[ir.ORIGIN].unsure
    assert len(notes) == 1


def test_multiple_outputs_and_no_tensors() -> None:
    def fn(x: Tensor) -> Any:
        values, indices = x.topk(2)
        return values.to(x.dtype), indices, torch.ones(2, dtype=torch.int64)

    gm, notes = marked(fn, X)
    assert verdicts(gm) == [True]
    assert notes == []


def test_graphs_inside_are_compared_too() -> None:
    def fn(p: Tensor, x: Tensor) -> Tensor:
        return torch.cond(p, lambda x: (x.float().exp().to(x.dtype),), lambda x: (x * 2,), (x,))[0]

    gm, _ = beside_its_twin(fn, torch.tensor(True), X)
    assert PASS.run(gm, replace(context(), twin=beside_its_twin(fn, torch.tensor(True), X)[1].twin))
    inner = dict(ir.all_graphs(gm))["true_graph_0"]
    assert verdicts(inner) == [False, True]


def test_without_a_twin_nothing_changes() -> None:
    gm = pre_dispatch(lambda x, y: x.float().to(y.dtype), X, Y)
    normalize.PASS.run(gm, context())
    unchanged(PASS, gm, context(), inputs=[X, Y])


def test_the_verifier_sees_a_verdict_that_cannot_be() -> None:
    gm = pre_dispatch(lambda x: x.double(), X)
    ops(gm, "to")[0].meta[ir.ORIGIN] = Origin(follows=True)
    with pytest.raises(VerifyError, match=r"node 'to'.*said to follow a dtype"):
        verify(gm, (facts.ORIGIN,), context(), "a test", deep=False)


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "explicit": lambda x, y: x.to(torch.float32), "follow": lambda x, y: x.to(y.dtype), "add": lambda x, y: x + 1,
    "mul": lambda x, y: x * y, "half": lambda x, y: x.to(torch.float16),
    "fill": lambda x, y: x + torch.ones(4, dtype=y.dtype),
}  # fmt: skip


@given(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=12), st.sampled_from(LOW))
def test_every_cast_gets_the_right_verdict(names: list[str], low: torch.dtype) -> None:
    """Whatever stands around a cast: it follows a dtype if and only if it was written so, and nothing is in doubt."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        for name in names:
            x = STEPS[name](x, y)
        return x

    gm, notes = marked(fn, X, Y, low=low)
    expected = [name == "follow" for name in names if name in ("explicit", "follow", "half")]
    found = [n.meta[ir.ORIGIN].follows for n in ops(gm, "to") if n.meta[ir.ORIGIN].twin is not None]
    same_in_fp32 = [f and ir.tensor_of(n).dtype is F32 for f, n in zip(expected, ops(gm, "to"), strict=True)]
    assert found == same_in_fp32
    assert notes == []


def test_an_input_that_only_the_low_dtype_uses() -> None:
    """The twin has one input more; the others are still known by their names."""
    gm, ctx = beside_its_twin(lambda x, y: (x.float() * 2).to(x.dtype) + y, X, Y)
    with ctx.twin.graph.inserting_before(next(iter(ctx.twin.graph.nodes))):
        ctx.twin.graph.placeholder("a_scale").meta["val"] = torch.empty(4, dtype=BF16)
    check_pass(PASS, gm, ctx)
    assert verdicts(gm) == [False, True]
    assert find(gm, "x_1").meta[ir.ORIGIN].twin is BF16


def test_scopes_in_the_twin_are_no_code_of_its_own() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        with precision("float32"):
            return x.exp().to(y.dtype)

    _, notes = marked(fn, X, Y)
    assert notes == []
