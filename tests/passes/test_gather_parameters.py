"""gather_parameters: parameters are gathered before they are used, in the narrowest dtype that changes no bit."""

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
from amp_compiler.passes import fold_casts, gather_parameters, hoist_weight_casts
from amp_compiler.rewrite.base import Context
from amp_compiler.rewrite.facts.parallel import collective
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.reduction import Reduction
from amp_compiler.rewrite.sharding import Sharding
from helpers import BF16, F16, check_pass, context, step_graph


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of one process; graphs for more are only looked at."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def divided(size: int = 2, rank: int = 0, *, reshard: bool = True, limit: int = 0, **options: Any) -> Context:
    """``limit``: the bytes of a bucket; 0: each parameter is gathered by itself."""
    world: Any = dist.group.WORLD
    sharding = Sharding(Reduction(world.group_name, size, bucket_bytes=limit), rank, reshard)
    return dataclasses.replace(context(), sharding=sharding, **options)


def graph(fn: Any, *inputs: Tensor) -> fx.GraphModule:
    gm = step_graph(fn, *inputs)
    gm.meta[ir.SHARDED] = {index: f"p{index}" for index in gm.meta[ir.PARAMETER]}
    fold_casts.PASS.run(gm, context())
    return gm


def layers(*tensors: Tensor) -> Tensor:
    """A chain of products in bf16; the input comes last."""
    *weights, x = tensors
    x = x.to(BF16)
    for weight in weights:
        x = torch.tanh(x @ weight.to(BF16))
    return x.float().pow(2).mean()


def inputs_of(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [*(torch.randn(4, 4, requires_grad=True) for _ in range(count)), torch.randn(3, 4)]


def gathers(gm: fx.GraphModule) -> list[tuple[str, tuple[str, ...], torch.dtype]]:
    return [(g.phase, g.names, g.dtype) for g in gm.meta[ir.GATHERS]]


def test_the_smallest_graph() -> None:
    w, x = torch.randn(4, 2, requires_grad=True), torch.randn(2, 4)
    gm = graph(lambda w, x: (x.to(BF16) @ w.to(BF16)).float().sum(), w, x)
    world: Any = dist.group.WORLD
    check_pass(
        gather_parameters.PASS, gm, divided(), f"""
        input p0: f32[2, 2]
        input p1: f32[2, 4]
        input tangents_1: f32[]
        view_default: f32[4] = view(p0, [4])
        _to_copy_default: bf16[4] = cast(view_default, bf16)
        gather_0: bf16[8] = all_gather_into_tensor(_to_copy_default, 2, {world.group_name})
        _to_copy: bf16[2, 4] = cast(p1, bf16)
        gathered_0: bf16[8] = wait_tensor(gather_0)
        whole_p0: bf16[4, 2] = view(gathered_0, [4, 2])
        mm: bf16[2, 2] = mm(_to_copy, whole_p0)
        _to_copy_2: f32[2, 2] = cast(mm, f32)
        sum_1: f32[] = sum(_to_copy_2)
        clone_default: f32[] = clone(sum_1)
        expand: f32[2, 2] = expand(tangents_1, [2, 2])
        _to_copy_3: bf16[2, 2] = cast(expand, bf16)
        t: bf16[4, 2] = t(_to_copy)
        mm_1: bf16[4, 2] = mm(t, _to_copy_3)
        _to_copy_4: f32[4, 2] = cast(mm_1, f32)
        return clone_default, _to_copy_4
        """, modified=True,
    )  # fmt: skip


@pytest.mark.parametrize("limit", [0, 1 << 20])
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_the_values_are_those_of_whole_parameters(limit: int, reshard: bool, accumulates: bool) -> None:
    inputs = inputs_of(3)
    check_pass(
        gather_parameters.PASS, graph(layers, *inputs),
        divided(1, limit=limit, reshard=reshard, accumulates=accumulates),
        inputs=[*(t.detach() for t in inputs), torch.ones(())], modified=True,
    )  # fmt: skip


def test_the_backward_gathers_again() -> None:
    gm = check_pass(gather_parameters.PASS, graph(layers, *inputs_of(3)), divided(), modified=True)
    assert gathers(gm) == [
        *(("forward", (f"p{i}",), BF16) for i in (0, 1, 2)), *(("backward", (f"p{i}",), BF16) for i in (2, 1)),
    ]  # fmt: skip


def test_parameters_that_stay_are_gathered_once() -> None:
    gm = check_pass(gather_parameters.PASS, graph(layers, *inputs_of(3)), divided(reshard=False), modified=True)
    assert gathers(gm) == [("forward", (f"p{i}",), BF16) for i in (0, 1, 2)]


def test_at_most_two_parameters_are_whole_at_a_time() -> None:
    """A gather starts when the one ahead of it has arrived, and what was gathered is let go after its last use."""
    gm = check_pass(gather_parameters.PASS, graph(layers, *inputs_of(5)), divided(), modified=True)
    nodes = list(gm.graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    classes = ir.alias_classes(gm.graph)
    spans = []
    for node in nodes:
        if collective(node) == "all_gather_into_tensor":
            (wait,) = node.users
            shown = [n for n in nodes if classes[n] == classes[wait]]
            spans.append((position[node], max(position[user] for n in shown for user in n.users)))
    assert len(spans) == 9
    assert max(sum(first <= place <= last for first, last in spans) for place in range(len(nodes))) == 2
    started = [n.name for n in nodes if collective(n)]
    assert started[:4] == ["gather_0", "gathered_0", "gather_1", "gathered_1"]
    named = {node.name: position[node] for node in nodes}
    between = nodes[named["gather_1"] : named["gathered_1"]]
    assert any(ir.op_name(n) == "mm" for n in between)  # computation overlaps the gather


def test_what_some_op_reads_wide_is_gathered_once_and_wide() -> None:
    w, x = inputs_of(1)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x.to(BF16) @ w.to(BF16)).float().sum() + w.exp().sum()

    gm = check_pass(gather_parameters.PASS, graph(loss, w, x), divided(), modified=True)
    assert [g for g in gathers(gm) if g[0] == "forward"] == [("forward", ("p0",), torch.float32)]


def test_two_low_dtypes_are_made_of_one_wide_gather() -> None:
    w, x = inputs_of(1)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x.to(BF16) @ w.to(BF16)).float().sum() + (x.to(F16) @ w.to(F16)).float().sum()

    gm = check_pass(gather_parameters.PASS, graph(loss, w, x), divided(), modified=True)
    assert gathers(gm) == [("forward", ("p0",), torch.float32)]


def test_a_cast_behind_a_view_counts() -> None:
    w, x = inputs_of(1)
    gm = check_pass(
        gather_parameters.PASS, graph(lambda w, x: (x.to(BF16) @ w.t().to(BF16)).float().sum(), w, x), divided(),
        modified=True,
    )  # fmt: skip
    assert gathers(gm) == [("forward", ("p0",), BF16)]


def test_small_parameters_share_a_gather() -> None:
    gm = check_pass(gather_parameters.PASS, graph(layers, *inputs_of(4)), divided(limit=64), modified=True)
    assert [g[1] for g in gathers(gm)] == [("p0", "p1"), ("p2", "p3"), ("p3", "p2"), ("p1",)]
    assert [g.bytes for g in gm.meta[ir.GATHERS]] == [64, 64, 64, 32]


def test_casts_of_whole_shards_can_be_hoisted() -> None:
    """Where micro-batches are accumulated a shard is cast once per update."""
    ctx = divided(accumulates=True)
    gm = check_pass(gather_parameters.PASS, graph(layers, *inputs_of(2)), ctx, modified=True)
    check_pass(hoist_weight_casts.PASS, gm, ctx, modified=True)
    made = [n.meta["val"] for n in gm.meta[ir.WEIGHTS].graph.nodes if n.op == "call_function"]
    assert [list(value.shape) for value in made] == [[2, 4], [2, 4]]


def test_what_is_checkpointed_is_gathered_again_by_the_partitioner() -> None:
    ctx = divided(recomputes=True)
    gm = check_pass(gather_parameters.PASS, graph(layers, *inputs_of(2)), ctx, modified=True)
    assert {g[0] for g in gathers(gm)} == {"forward"}
    assert all("recompute" in n.meta for n in gm.graph.nodes if collective(n))


def test_a_parameter_that_the_forward_writes_to_is_refused() -> None:
    w, x = inputs_of(1)
    gm = graph(lambda w, x: (x @ w).sum(), w, x)
    gm.meta[ir.ROLE] = (*gm.meta[ir.ROLE], ir.Role("mutation", 0))
    with pytest.raises(CaptureError, match="writes to the parameter p0"):
        gather_parameters.PASS.run(gm, divided())


def test_a_single_process_is_left_alone() -> None:
    assert gather_parameters.PASS.run(graph(layers, *inputs_of(1)), context()) is False


def test_a_violated_requirement() -> None:
    with pytest.raises(PipelineError, match="needs 'functional'"):
        Pipeline((gather_parameters.PASS,), ())


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.integers(1, 7), min_size=1, max_size=4), size=st.integers(1, 5),
    limit=st.sampled_from([0, 40, 4000]), reshard=st.booleans(),
)  # fmt: skip
def test_any_rows_come_together_again(rows: list[int], size: int, limit: int, reshard: bool) -> None:
    """The rows of all processes, gathered as the graph does it, are the parameters."""
    weights = [torch.randn(n, 2, requires_grad=True) for n in rows]

    def loss(*weights: Tensor) -> Tensor:
        return torch.stack([w.to(BF16).float().pow(2).sum() for w in weights]).sum()

    before = graph(loss, *weights)
    values = [*(w.detach() for w in weights), torch.ones(())]
    expected = before(*values)
    graphs = []
    for rank in range(size):
        own = divided(size, rank, limit=limit, reshard=reshard)
        graphs.append(check_pass(gather_parameters.PASS, ir.copy_graph(before), own))
    assert all(g.meta[ir.GATHERS] == graphs[0].meta[ir.GATHERS] for g in graphs)
    shards = [
        [w[rank * -(-n // size) : (rank + 1) * -(-n // size)] for w, n in zip(values, rows, strict=False)]
        for rank in range(size)
    ]
    sent = [Gathering(g).collect(*shards[rank], values[-1]) for rank, g in enumerate(graphs)]
    whole = [torch.cat(parts) for parts in zip(*sent, strict=True)]
    for rank, g in enumerate(graphs):
        found = Gathering(g, whole).run(*shards[rank], values[-1])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Gathering(fx.Interpreter):
    """Runs a graph with what ``whole`` says the gathers give; without it, notes what this process sends."""

    def __init__(self, gm: fx.GraphModule, whole: list[Tensor] | None = None) -> None:
        super().__init__(gm)
        self.whole = whole
        self.sent: list[Tensor] = []

    def collect(self, *args: Tensor) -> list[Tensor]:
        with torch.no_grad():
            self.run(*args)
        return self.sent

    def run_node(self, n: fx.Node) -> Any:
        if collective(n) == "all_gather_into_tensor":
            given = self.fetch_args_kwargs_from_env(n)[0][0]
            self.sent.append(given)
            if self.whole is not None:
                return self.whole[len(self.sent) - 1]
            return torch.cat([given] * int(n.args[1]))  # type: ignore[call-overload]
        return self.fetch_args_kwargs_from_env(n)[0][0] if collective(n) == "wait_tensor" else super().run_node(n)
