"""Run every op of a graph again on fake tensors, to check that each returns what its node's meta says."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from .. import ir
from ..common.torch_names import pytree
from ..ir.regions import Region
from .base import Place

#: ops that switch a mode of torch for the ops that follow: the dtypes in the graph are those without autocast
_MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


def repropagate(gm: fx.GraphModule, after: str) -> None:
    """Run every op on fakes and compare dtypes with the meta, graph by graph."""
    regions = set(_in_regions(gm))
    for name, inner in ir.all_graphs(gm):
        _Again(inner, Place(after, name), regions).check()


def _in_regions(gm: fx.GraphModule, inside: bool = False) -> Iterator[fx.Node]:
    """Yield the nodes in autocast regions, including graphs inside them, until ``insert_casts`` has run. Before that,
    their values may be those under autocast, as torch.export traces them, or without it, as Dynamo does."""
    if gm.meta.get(ir.SETTLED):
        return
    depth = int(inside)
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        depth += (name == "_enter_autocast") - (name == "_exit_autocast")
        region = node.meta.get(ir.REGION)
        marked = isinstance(region, Region) and region.kind == "autocast"
        if depth > 0 or marked:
            yield node
        if ir.is_higher_order(node):
            for _, body in ir.subgraphs(gm, node):
                yield from _in_regions(body, depth > 0 or marked)


class _Again(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, place: Place, regions: Collection[fx.Node]) -> None:
        super().__init__(gm)
        self.nodes = gm.graph.nodes
        self.place, self.regions = place, regions

    def check(self) -> None:
        nodes = list(self.nodes)
        inputs = [n.meta.get("val") for n in nodes if n.op == "placeholder"]
        tensors = [v for n in nodes for v in ir.tensor_outputs(n) if v is not None]
        mode = next((m for v in tensors if (m := getattr(v, "fake_mode", None)) is not None), None)
        if mode is None:
            return
        clean = [ir.retype(v, v.dtype) if isinstance(v, torch.Tensor) else v for v in inputs]
        with mode, torch.no_grad():
            self.run(*clean)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            value = n.meta.get("val")
            return value if isinstance(value, torch.Tensor) else super().run_node(n)
        if n.op == "call_function" and getattr(n.target, "__name__", "") in _MODES:
            return None
        if n.op == "call_function" and n in self.regions:
            return n.meta.get("val")
        if ir.is_higher_order(n):
            return n.meta.get("val")  # its bodies are graphs of their own
        if n.op == "call_function" and ir.op_name(n) in ("item", "_local_scalar_dense"):
            return n.meta.get("val")  # a new symbol would be missing from the graph's results for AOTAutograd
        result = super().run_node(n)
        if n.op == "call_function":
            for got, said in zip(
                pytree.tree_leaves(result), pytree.tree_leaves(n.meta.get("val")), strict=False
            ):
                if (
                    isinstance(got, torch.Tensor)
                    and isinstance(said, torch.Tensor)
                    and got.dtype != said.dtype
                ):
                    self.place.fail(f"returns {got.dtype}, but its meta says {said.dtype}.", n)
        return result
