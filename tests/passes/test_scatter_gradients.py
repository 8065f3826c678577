"""scatter_gradients: every gradient is averaged once, and each process gets its rows of it."""

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
from amp_compiler.passes import scale_loss, scatter_gradients
from amp_compiler.rewrite.base import Context
from amp_compiler.rewrite.facts.parallel import collective
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.reduction import Reduction
from amp_compiler.rewrite.sharding import Sharding
from helpers import BF16, by_kind, check_pass, context, run_step, step_graph


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of one process; graphs for more are only looked at."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def divided(size: int = 2, rank: int = 0, **options: Any) -> Context:
    world: Any = dist.group.WORLD
    return dataclasses.replace(context(), sharding=Sharding(Reduction(world.group_name, size, **options), rank))


def graph(fn: Any, *inputs: Tensor, scale: bool = True) -> fx.GraphModule:
    gm = step_graph(fn, *inputs)
    gm.meta[ir.SHARDED] = {index: f"p{index}" for index in gm.meta[ir.PARAMETER]}
    if scale:
        scale_loss.PASS.run(gm, context())
    return gm


def dense(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return (x.to(BF16) @ w.to(BF16) + b.to(BF16)).float().pow(2).mean()


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True), torch.randn(4, 3)]


def shapes(gm: fx.GraphModule, kind: str = "gradient") -> list[list[int]]:
    last = next(iter(reversed(gm.graph.nodes)))
    pairs = zip(gm.meta[ir.ROLE], last.args[0], strict=True)  # type: ignore[arg-type]
    return [list(node.meta["val"].shape) for role, node in pairs if role.kind == kind]


def run(gm: fx.GraphModule, *inputs: Tensor) -> dict[str, list[Tensor]]:
    return {kind: list(values.values()) for kind, values in by_kind(run_step(gm, *inputs)).items()}


def test_the_smallest_graph() -> None:
    w = torch.randn(4, requires_grad=True)
    gm = graph(lambda w: (w * w).sum(), w, scale=False)
    world: Any = dist.group.WORLD
    check_pass(
        scatter_gradients.PASS, gm, divided(), f"""
        input p0: f32[4]
        input tangents_1: f32[]
        mul: f32[4] = mul.Tensor(p0, p0)
        sum_1: f32[] = sum(mul)
        clone_default: f32[] = clone(sum_1)
        expand: f32[4] = expand(tangents_1, [4])
        mul_1: f32[4] = mul.Tensor(expand, p0)
        mul_2: f32[4] = mul.Tensor(expand, p0)
        add: f32[4] = add.Tensor(mul_2, mul_1)
        mean_0: f32[4] = div.Scalar(add, 2)
        sent_0: f32[2] = reduce_scatter_tensor(mean_0, sum, 2, {world.group_name})
        grad_p0: f32[2] = wait_tensor(sent_0)
        return clone_default, grad_p0
        """, modified=True,
    )  # fmt: skip


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_one_process_has_all_rows(scale: bool, bucket_bytes: int) -> None:
    inputs = leaves()
    alone = run(graph(dense, *inputs, scale=scale), *inputs)
    gm = check_pass(
        scatter_gradients.PASS, graph(dense, *inputs, scale=scale), divided(1, bucket_bytes=bucket_bytes), modified=True
    )
    together = run(gm, *inputs)
    for mine, theirs in zip(together["gradient"], alone["gradient"], strict=True):
        assert torch.equal(mine, theirs)


def test_a_large_gradient_is_sent_by_itself_and_waited_for_before_the_next() -> None:
    gm = check_pass(scatter_gradients.PASS, graph(dense, *leaves()), divided(bucket_bytes=12), modified=True)
    assert gm.meta[ir.SCATTERS] in ((("p1",), ("p0",)), (("p0",), ("p1",)))
    assert [name for node in gm.graph.nodes if (name := collective(node))] == [
        "reduce_scatter_tensor", "wait_tensor", "reduce_scatter_tensor", "wait_tensor", "all_reduce", "wait_tensor",
    ]  # fmt: skip


@pytest.mark.parametrize(("rank", "rows"), [(0, [[2, 2], [1]]), (1, [[1, 2], [1]])])
def test_uneven_rows_are_padded_and_cut_off(rank: int, rows: list[list[int]]) -> None:
    gm = check_pass(scatter_gradients.PASS, graph(dense, *leaves()), divided(rank=rank), modified=True)
    assert shapes(gm) == rows


def test_the_flag_is_the_maximum_over_the_processes() -> None:
    gm = check_pass(scatter_gradients.PASS, graph(dense, *leaves()), divided(), modified=True)
    (found,) = [n for n in gm.graph.nodes if "all_reduce" in ir.op_name(n)]
    assert found.args[1] == "max"


def test_a_number_is_reduced_as_a_whole() -> None:
    gain, x = torch.tensor(2.0, requires_grad=True), torch.randn(4)
    gm = check_pass(
        scatter_gradients.PASS, graph(lambda g, x: (g * x).pow(2).mean(), gain, x), divided(), modified=True
    )
    assert shapes(gm) == [[]]
    assert not any(collective(node) == "reduce_scatter_tensor" for node in gm.graph.nodes)


def test_low_communication() -> None:
    gm = check_pass(scatter_gradients.PASS, graph(dense, *leaves()), divided(dtype=BF16), modified=True)
    (sent,) = [n for n in gm.graph.nodes if "reduce_scatter" in ir.op_name(n)]
    assert sent.meta["val"].dtype == BF16


def test_a_tensor_that_is_not_a_parameter_is_refused() -> None:
    gm = graph(dense, *leaves())
    del gm.meta[ir.SHARDED][0]
    with pytest.raises(CaptureError, match="not a parameter of the model's modules"):
        scatter_gradients.PASS.run(gm, divided())


def test_a_single_process_is_left_alone() -> None:
    gm = graph(dense, *leaves())
    assert scatter_gradients.PASS.run(gm, context()) is False


def test_a_violated_requirement() -> None:
    with pytest.raises(PipelineError, match="needs 'functional'"):
        Pipeline((scatter_gradients.PASS,), ())


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.integers(1, 7), min_size=1, max_size=4), size=st.integers(1, 5),
    limit=st.sampled_from([0, 40, 4000]),
)  # fmt: skip
def test_the_rows_of_all_processes_are_all_rows(rows: list[int], size: int, limit: int) -> None:
    inputs = [torch.randn(n, 2, requires_grad=True) for n in rows]

    def loss(*weights: Tensor) -> Tensor:
        return torch.stack([w.pow(2).sum() for w in weights]).sum()

    found = [0] * len(rows)
    for rank in range(size):
        gm = check_pass(scatter_gradients.PASS, graph(loss, *inputs), divided(size, rank, bucket_bytes=limit))
        found = [total + shape[0] for total, shape in zip(found, shapes(gm), strict=True)]
    assert found == rows
