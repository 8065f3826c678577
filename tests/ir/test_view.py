"""A graph as plain values: what is kept of it, and what differentiation lost is found again."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import amp_compile
from amp_compiler.inspect.render.pieces import merge_pieces
from amp_compiler.inspection import AUTODIFF, inspect_model, inspect_program
from amp_compiler.ir.view import BACKWARD, KINDS, GraphView
from amp_compiler.policy import Policy
from networks import NETWORKS

POLICY = Policy("O2", torch.bfloat16)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def view_of(graph: str) -> GraphView:
    return inspect_model(Two(), (torch.ones(3, 4),), policy=POLICY, graph=graph, capture="export").last


def test_the_forward_graph() -> None:
    view = view_of("forward")
    assert [n.label for n in view.nodes if n.kind == "parameter"] == [
        "first.weight", "first.bias", "second.weight", "second.bias",
    ]  # fmt: skip
    linear = view.by_name["linear"]
    assert (linear.op, linear.module, linear.precision, linear.value, linear.flops) == (
        "linear", "first", "bfloat16", "bf16[3, 8]", 2 * 3 * 8 * 4,
    )  # fmt: skip
    assert linear.source.endswith("return self.second(torch.relu(self.first(x)))")
    assert view.classes["first"] == "Linear"
    assert {n.kind for n in view.nodes} <= set(KINDS)
    assert [n.name for n in view.users["linear"]] == ["relu"]


def test_every_differentiated_op_knows_its_forward_op() -> None:
    view = view_of("joint")
    assert view.has_backward
    for node in view.nodes:
        if node.kind == "call":
            assert node.origin, node
            assert node.module == {"linear": "first", "linear_1": "second", "relu": ""}[node.origin]
            assert node.reason.startswith("backward of ") == (node.part == BACKWARD)
    products = [n for n in view.nodes if n.op in ("amp::cast_matmul", "mm", "addmm")]
    assert {n.origin for n in products} == {"linear", "linear_1"}
    assert {n.part for n in products} == {"forward", BACKWARD}
    assert {n.precision for n in products} == {"bfloat16"}, "a product in fp32 out is still a low product"


@pytest.mark.parametrize("name", ["lstm", "llama", "functional_mix"])
def test_views_of_many_networks(name: str) -> None:
    model, args = NETWORKS[name]()
    found = inspect_model(model.eval(), args, policy=POLICY, graph="inference", capture="export")
    for stage in found.stages:
        view = stage.view
        assert len(view.by_name) == len(view.nodes) == stage.nodes
        assert len(view.casts) == stage.casts
        assert all(i in view.by_name for n in view.nodes for i in n.inputs)
    assert [n for n in found.last.nodes if n.kind == "call" and not n.reason] == []
    assert pickle.loads(pickle.dumps(found.last)) == found.last, "no tensor and no node is held"


def test_a_pass_that_changes_nothing_shares_the_view() -> None:
    found = inspect_model(Two(), (torch.ones(3, 4),), policy=POLICY, capture="export")
    stages = {s.name: s for s in found.stages}
    assert not stages["normalize"].modified
    assert stages["normalize"].view is stages["capture"].view
    assert stages["insert_casts"].view is not stages["assign_precision"].view


def test_history_of_amp_compile_has_views() -> None:
    model = Two()
    fast = amp_compile(model, dtype=torch.bfloat16, backend="eager")
    fast(torch.ones(3, 4)).sum().backward()
    last = fast.history[-1]
    assert last.graph == "joint"
    origins = {n.origin for n in last.view.nodes if n.kind == "call"}
    assert {"linear", "linear_1"} <= origins
    assert {n.module for n in last.view.nodes if n.origin == "linear"} == {"first"}


def test_bodies_are_part_of_the_view() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))

    view = inspect_model(Branch(), (torch.ones(3),), policy=POLICY, capture="export").last
    inside = [n for n in view.nodes if n.subgraph]
    assert {n.op for n in inside if n.kind == "call"} >= {"sin", "cos"}
    places = [n for n in inside if n.op == "placeholder"]
    assert [view.by_name[n.inputs[0]].title for n in places] == ["x", "x"]


def test_pieces_become_one() -> None:
    model, args = NETWORKS["graph_break"]()
    fast = amp_compile(model, dtype=torch.bfloat16, backend="eager")
    with torch.no_grad():
        fast(*args)
    stages = merge_pieces(fast.history)
    assert len(stages) == len({(s.name, s.graph) for s in stages})
    last = stages[-1].view
    assert {n.subgraph for n in last.nodes} == {"g0", "g1"}
    assert all(i in last.by_name for n in last.nodes for i in n.inputs)


def test_dynamo_steps_in_where_export_cannot() -> None:
    model, args = NETWORKS["graph_break"]()

    class Depends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return y + 1 if bool(y.sum() > 0) else y

    found = inspect_model(Depends(), args, policy=POLICY)
    assert found.notes[0].startswith("captured by Dynamo")
    assert found.report.casts == len(found.last.casts) > 0


def test_a_program_is_inspected_as_it_was_exported() -> None:
    program = torch.export.export(Two(), (torch.ones(3, 4),))
    found = inspect_program(program, policy=POLICY, graph="inference")
    assert [s.name for s in found.stages].index(AUTODIFF) == 5
    assert {n.label for n in found.last.nodes if n.kind == "parameter"} == {
        "first.weight", "first.bias", "second.weight", "second.bias",
    }  # fmt: skip
    assert {n.module for n in found.forward.nodes if n.op == "linear"} == {"first", "second"}


