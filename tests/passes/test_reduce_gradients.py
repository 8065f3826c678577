"""reduce_gradients and reduce_in_place: every gradient is averaged once, in buckets, as early as it can be sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from amp_compiler import ir
from amp_compiler.common.errors import CaptureError, PipelineError
from amp_compiler.passes import reduce_gradients, reduce_in_place, scale_loss
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.base import Context
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.reduction import Reduction
from helpers import BF16, F16, by_kind, check_pass, context, ops, run_step, step_graph


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of one process, whose sum is its own value."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shared(**options: Any) -> Context:
    group: Any = dist.group.WORLD
    reduction = Reduction(group.group_name, options.pop("size", 2), **options)
    return dataclasses.replace(context(), reduction=reduction)


def scaled(fn: Any, *inputs: Tensor, scale: bool = True) -> fx.GraphModule:
    gm = step_graph(fn, *inputs)
    gm.meta[ir.NAMES] = {index: f"p{index}" for index in gm.meta[ir.PARAMETER]}
    if scale:
        scale_loss.PASS.run(gm, context())
    return gm


def run(gm: fx.GraphModule, *inputs: Tensor, sums: dict[int, Tensor] | None = None) -> dict[str, dict[int, Tensor]]:
    return by_kind(run_step(gm, *inputs, sums=sums))


def dense(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return (x.to(BF16) @ w.to(BF16) + b.to(BF16)).float().pow(2).mean()


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True), torch.randn(4, 3)]


def test_the_smallest_graph() -> None:
    w = torch.randn(2, requires_grad=True)
    gm = scaled(lambda w: (w * w).sum(), w, scale=False)
    check_pass(
        reduce_gradients.PASS, gm, shared(), f"""
        input p0: f32[2]
        input tangents_1: f32[]
        mul: f32[2] = mul.Tensor(p0, p0)
        sum_1: f32[] = sum(mul)
        clone_default: f32[] = clone(sum_1)
        expand: f32[2] = expand(tangents_1, [2])
        mul_1: f32[2] = mul.Tensor(expand, p0)
        mul_2: f32[2] = mul.Tensor(expand, p0)
        add: f32[2] = add.Tensor(mul_2, mul_1)
        bucket_0: f32[2] = view(add, [2])
        mean_0: f32[2] = div.Scalar(bucket_0, 2)
        sent_0: f32[2] = all_reduce(mean_0, sum, {group_name()})
        reduced_0: f32[2] = wait_tensor(sent_0)
        split_with_sizes_default: (f32[2]) = split_with_sizes(reduced_0, [2])
        getitem: f32[2] = getitem(split_with_sizes_default, 0)
        grad_p0: f32[2] = view(getitem, [2])
        return clone_default, grad_p0
        """, modified=True,
    )  # fmt: skip


def group_name() -> str:
    group: Any = dist.group.WORLD
    name: str = group.group_name
    return name


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("scale", [False, True])
def test_gradients_are_divided_by_the_number_of_processes(in_place: bool, scale: bool) -> None:
    inputs = leaves()
    alone = run(scaled(dense, *inputs, scale=scale), *inputs)
    gm = check_pass(reduce_gradients.PASS, scaled(dense, *inputs, scale=scale), shared(), modified=True)
    if in_place:
        check_pass(reduce_in_place.PASS, gm, shared(), modified=True)
    together = run(gm, *inputs)
    for index, gradient in alone["gradient"].items():
        assert torch.equal(together["gradient"][index], gradient / 2)


def test_a_sum_of_micro_batches_is_reduced_once() -> None:
    inputs = leaves()
    alone = run(scaled(dense, *inputs), *inputs)["gradient"]
    sums = {index: torch.randn_like(gradient) for index, gradient in alone.items()}
    gm = check_pass(reduce_gradients.PASS, scaled(dense, *inputs), shared(of_sums=True), modified=True)
    check_pass(reduce_in_place.PASS, gm, shared(of_sums=True), modified=True)
    totals = run(gm, *inputs, sums=sums)["total"]
    for index, gradient in alone.items():
        torch.testing.assert_close(totals[index], (gradient + sums[index]) / 2, rtol=1e-6, atol=1e-6)
    assert len(ops(gm, "_c10d_functional::all_reduce_")) == 1


@pytest.mark.parametrize("sums", [False, True])
def test_an_overflow_before_the_reduction_is_seen_behind_it(sums: bool) -> None:
    inputs = leaves()
    gm = scaled(dense, *inputs)
    reduce_gradients.PASS.run(gm, shared(of_sums=sums))
    held = {0: torch.full((3, 2), float("inf")), 1: torch.zeros(2)}
    if not sums:
        inputs[2][0, 0] = float("inf")
    assert run(gm, *inputs, sums=held)["found"] == {0: torch.ones(1)}


def test_each_bucket_is_sent_behind_its_last_gradient() -> None:
    def deep(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
        return (((x @ a).relu() @ b).relu() @ c).sum()

    inputs = [torch.randn(3, 3, requires_grad=True) for _ in range(3)] + [torch.randn(2, 3)]
    gm = scaled(deep, *inputs)
    check_pass(reduce_gradients.PASS, gm, shared(bucket_bytes=36), modified=True)
    assert gm.meta[ir.BUCKETS] == (("p2",), ("p1",), ("p0",))  # the backward begins at the last layer
    kinds = [ir.op_name(n) for n in gm.graph.nodes if n.op == "call_function"]
    sent = [i for i, kind in enumerate(kinds) if kind.endswith("all_reduce")]
    waits = [i for i, kind in enumerate(kinds) if kind.endswith("wait_tensor")]
    products = [i for i, kind in enumerate(kinds) if kind == "mm"]
    assert len(sent) == len(waits) == 3
    assert sum(i < products[-1] for i in sent) == 2  # two are under way while the rest is computed
    assert min(waits) > max(*sent, *products)


def test_a_low_reduction_sends_half_the_bytes() -> None:
    inputs = leaves()
    gm = check_pass(reduce_gradients.PASS, scaled(dense, *inputs), shared(dtype=BF16), modified=True)
    (sent,) = ops(gm, "_c10d_functional::all_reduce")
    assert sent.meta["val"].dtype == BF16
    assert all(g.dtype == torch.float32 for g in run(gm, *inputs)["gradient"].values())


def test_a_layout_is_kept() -> None:
    inputs = leaves()
    layout = (("p0",), ("p1",))
    gm = check_pass(reduce_gradients.PASS, scaled(dense, *inputs), shared(layouts=((("p0",),), layout)), modified=True)
    assert gm.meta[ir.BUCKETS] == layout
    assert len(ops(gm, "_c10d_functional::all_reduce")) == 2


def test_a_layout_of_other_parameters_is_left_alone() -> None:
    gm = scaled(dense, *leaves())
    check_pass(reduce_gradients.PASS, gm, shared(layouts=((("p0",),),)), modified=True)
    assert sorted(sum(gm.meta[ir.BUCKETS], ())) == ["p0", "p1"]


def test_a_sparse_gradient_is_refused() -> None:
    weight = torch.randn(5, 2, requires_grad=True)

    def embed(weight: Tensor, index: Tensor) -> Tensor:
        return torch.nn.functional.embedding(index, weight, sparse=True).sum()

    with pytest.raises(CaptureError, match=r"gradient of p0 is sparse.*sparse=False"):
        reduce_gradients.PASS.run(scaled(embed, weight, torch.tensor([1, 2])), shared())


def test_what_it_needs() -> None:
    with pytest.raises(PipelineError, match="needs 'functional'"):
        Pipeline((reduce_gradients.PASS,), ())
    with pytest.raises(PipelineError, match="needs 'reduced'"):
        Pipeline((reduce_in_place.PASS,), (facts.FUNCTIONAL, facts.STEP))


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=5),
    lows=st.lists(st.sampled_from([None, BF16, F16]), min_size=5, max_size=5),
    bucket=st.integers(1, 200),
    size=st.sampled_from([1, 2, 4]),
    in_place=st.booleans(),
)
def test_any_gradients_in_any_buckets(
    shapes: list[list[int]], lows: list[torch.dtype | None], bucket: int, size: int, in_place: bool
) -> None:
    """Whatever the shapes, dtypes and buckets: each gradient is its own, divided once."""

    def loss(*parameters: Tensor) -> Tensor:
        total = torch.zeros(())
        for parameter, low in zip(parameters, lows, strict=False):
            value = parameter.t() if parameter.dim() == 2 else parameter
            total = total + (value if low is None else value.to(low)).float().pow(2).sum()
        return total

    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    alone = run(scaled(loss, *inputs), *inputs)["gradient"]
    gm = check_pass(reduce_gradients.PASS, scaled(loss, *inputs), shared(bucket_bytes=bucket, size=size), modified=True)
    if in_place:
        check_pass(reduce_in_place.PASS, gm, shared(), modified=True)
    together = run(gm, *inputs)["gradient"]
    assert together.keys() == alone.keys()
    for index, gradient in alone.items():
        assert torch.equal(together[index], gradient / size)
    assert sorted(name for names in gm.meta[ir.BUCKETS] for name in names) == sorted(f"p{i}" for i in alone)
