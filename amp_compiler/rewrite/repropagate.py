"""Running every op of a graph again on fake tensors, to see that each gives what its node says."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .. import ir
from .base import Place

#: what switches a mode of torch's, for the ops that follow: the dtypes in the graph are those without autocast
_MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


def repropagate(gm: fx.GraphModule, after: str) -> None:
    """Run every op on fakes and compare dtypes with the meta, graph by graph."""
    for name, inner in ir.all_graphs(gm):
        _Again(inner, Place(after, name)).check()


class _Again(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, place: Place) -> None:
        super().__init__(gm)
        self.nodes = gm.graph.nodes
        self.place = place

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
        if ir.is_higher_order(n):
            return n.meta.get("val")  # its bodies are graphs of their own
        if n.op == "call_function" and ir.op_name(n) in ("item", "_local_scalar_dense"):
            return n.meta.get("val")  # a new symbol would be one that AOTAutograd misses in the graph's results
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
                    self.place.fail(f"gives {got.dtype}, its meta says {said.dtype}.", n)
        return result
