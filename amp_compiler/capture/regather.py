"""Low copies of parameters that ``fully_shard`` frees after the forward: the backward makes them again.

A graph of a unit casts its parameters, and autograd would keep the low copies of all units until the backward. The
parameters themselves are freed by then and gathered again by the unit's hooks, so the backward casts them once more.

torch 2.13 internals: the tags by which ``default_partition`` tells where the forward ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from .. import ir
from ..common.torch_names import OpOverload, schema_of


def cast_again_in_backward(joint: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Have each node of the backward read its own casts, and views of casts, of parameters.

    ::

        low = cast(weight); y = mm(x, low); dx = mm(dy, t(low))
        →  low = cast(weight); y = mm(x, low); again = cast(weight); dx = mm(dy, t(again))
    """
    graph = joint.graph
    places = [n for n in graph.nodes if n.op == "placeholder" and not str(n.target).startswith("tangents")]
    if len(places) != len(example_inputs):
        return  # DTensors were taken apart: parts of a parameter are not told from other inputs
    made = {n for n, value in zip(places, example_inputs, strict=True) if isinstance(value, nn.Parameter)}
    casts: set[fx.Node] = set()
    backward: set[fx.Node] = {n for n in graph.nodes if n.op == "placeholder" and str(n.target).startswith("tangents")}
    again: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node, before: fx.Node) -> fx.Node:
        if node not in casts:
            return node
        if node not in again:
            sources = {source: copied(source, before) for source in node.all_input_nodes}
            with graph.inserting_before(before):
                again[node] = new = graph.node_copy(node, sources.__getitem__)
            for key in ("autograd_backward", "partitioner_tag"):  # by these torch's partitioner knows the backward
                new.meta.pop(key, None)
                if key in before.meta:
                    new.meta[key] = before.meta[key]
        return again[node]

    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if any(source in backward for source in node.all_input_nodes):
            backward.add(node)
            for source in node.all_input_nodes:
                if source in casts:
                    node.replace_input_with(source, copied(source, node))
        elif node.all_input_nodes and set(node.all_input_nodes) <= made and (ir.is_cast(node) or _is_view(node)):
            made.add(node)
            casts.add(node)
    if again:
        joint.recompile()


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return False
    return all(r.alias_info is not None for r in schema_of(target).returns) and isinstance(
        node.meta.get("val"), torch.Tensor
    )
