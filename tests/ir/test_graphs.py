"""Copies of graphs, conversions in all their spellings, and where the partitioner puts a node."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from amp_compiler import ir
from helpers import pre_dispatch

aten = torch.ops.aten


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.relu() + self.shift, lambda t: t.sin(), (x,))


def test_a_copy_shares_no_graph_and_has_the_same_names_and_values() -> None:
    gm = torch.export.export(Branches(), (torch.randn(3),), strict=False).graph_module
    assert isinstance(gm, fx.GraphModule)
    gm.meta["note"] = 1
    before = [(name, str(inner.graph)) for name, inner in ir.all_graphs(gm)]
    twin = ir.copy_graph(gm)
    assert len(before) == 3, "the branches are graphs of their own"
    assert [(name, str(inner.graph)) for name, inner in ir.all_graphs(twin)] == before
    assert twin.meta == gm.meta
    assert twin.meta is not gm.meta
    for (_, ours), (_, theirs) in zip(ir.all_graphs(gm), ir.all_graphs(twin), strict=True):
        assert ours is not theirs
        for old, new in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
            assert old is not new
            assert old.meta is not new.meta
            assert old.meta.get("val") is new.meta.get("val")
    body = next(inner for name, inner in ir.all_graphs(twin) if name)
    for node in list(body.graph.nodes):
        if node.op == "call_function":
            node.meta["changed"] = True
            node.target = aten.cos.default
    assert [(name, str(inner.graph)) for name, inner in ir.all_graphs(gm)] == before
    assert not any("changed" in n.meta for _, inner in ir.all_graphs(gm) for n in inner.graph.nodes)


def test_a_copy_keeps_constants_that_the_graph_names() -> None:
    root = nn.Module()
    root.register_buffer("held", torch.arange(3.0))
    graph = fx.Graph()
    graph.output((graph.call_function(aten.add.Tensor, (graph.placeholder("input"), graph.get_attr("held"))),))
    twin = ir.copy_graph(fx.GraphModule(root, graph))
    assert twin.held is root.held
    assert torch.equal(twin(torch.ones(3))[0], torch.tensor([1.0, 2.0, 3.0]))


def test_conversions_are_found_in_every_spelling() -> None:
    def spelled(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        converted = torch.ops.prims.convert_element_type(x, torch.bfloat16)
        return x.to(torch.bfloat16), x.type_as(y), aten._to_copy(x, dtype=torch.bfloat16), converted, x + 1, x.to("cpu")

    gm = pre_dispatch(spelled, torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
    found = [ir.op_name(n) for n in gm.graph.nodes if ir.is_conversion(n)]
    assert {"to", "_to_copy", "prims::convert_element_type"} <= set(found)
    assert "add" not in found
    named = fx.Graph().placeholder("to")
    assert not ir.is_conversion(named), "an input may have any name"


def test_a_node_is_placed_with_another() -> None:
    graph = fx.Graph()
    node, other = graph.placeholder("a"), graph.placeholder("b")
    node.meta.update(partitioner_tag="is_backward", ac_graph_id=1, kept=2)
    other.meta.update(recompute="must")
    ir.inherit_placement(node, other)
    assert node.meta == {"recompute": "must", "kept": 2}
