"""Graphs inside of graphs, and new nodes in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..common.torch_names import pytree
from .meta import CLOSED, ROLE, Role
from .schema import is_getitem, is_higher_order, op_name


def call(graph: fx.Graph, mode: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Insert a new node at the graph's insertion point, with the value that its op returns on fakes."""
    node = graph.call_function(target, args, kwargs)
    given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        node.meta["val"] = target(*given, **named)
    return node


def unscale_of(gm: fx.GraphModule) -> tuple[fx.Node, list[fx.Node], list[int]] | None:
    """Return (``amp::unscale``, the gradients passed to it, the positions of the outputs that come from it) of a
    training step; None if a gradient is sparse, is part of a bucket, or is rounded again afterwards, like a low
    parameter's."""
    op = next((n for n in gm.graph.nodes if op_name(n) == "amp::unscale"), None)
    last = next(iter(reversed(gm.graph.nodes)))
    results = pytree.tree_leaves(last.args[0])
    places = [i for i, role in enumerate(gm.meta[ROLE]) if role.kind == "gradient"]
    if op is None or not places or not all(_comes_from(results[i], op) for i in places):
        return None
    given = [n for n in pytree.tree_leaves(op.args[0]) if isinstance(n, fx.Node)]
    return None if any(n.meta["val"].layout is not torch.strided for n in given) else (op, given, places)


def _comes_from(gradient: fx.Node, op: fx.Node) -> bool:
    """True if ``gradient`` is ``op(…)[0][i]``."""
    gradients = gradient.args[0] if is_getitem(gradient) else None
    return isinstance(gradients, fx.Node) and is_getitem(gradients) and gradients.args[0] is op


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph and of the graphs inside it, with the same names; values and constants are shared."""
    graph = fx.Graph()
    result = graph.graph_copy(gm.graph, {})
    last = next(iter(reversed(gm.graph.nodes)))
    graph.output(result).meta = dict(last.meta)
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        new.meta, new.name = dict(old.meta), old.name  # fx would rename nodes that have the name of a builtin
    twin = fx.GraphModule(gm, graph)
    for node in graph.nodes:
        held = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, fx.GraphModule):
            setattr(twin, str(node.target), copy_graph(held))
    twin.meta = dict(gm.meta)
    return twin


def add_input(graph: fx.Graph, name: str, role: Role, value: torch.Tensor) -> fx.Node:
    """Add a last input to a joint graph. Its target starts as torch's partitioners expect of inputs of a backward."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(f"tangents_{name}")
    node._rename(name)
    node.meta.update({"val": value, ROLE: role})
    return node


def operands(node: fx.Node, body: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (input of the body, argument of the higher-order node) for each input of a graph inside a node whose
    argument is a node. Numbers are inputs too: where sizes are dynamic, a body gets them as arguments."""
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    given = [a for a in pytree.tree_leaves(node.args) if a is not None and not _is_body(a)]
    given += [a for a in pytree.tree_leaves(node.kwargs) if isinstance(a, fx.Node) and not _is_body(a)]
    pairs = zip(places, given[max(len(given) - len(places), 0) :], strict=False)
    yield from ((place, value) for place, value in pairs if isinstance(value, fx.Node))


def _is_body(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr"


def subgraphs(gm: fx.GraphModule, node: fx.Node) -> list[tuple[str, fx.GraphModule]]:
    """Return the graphs of a higher-order node that may be rewritten, with their names, in argument order."""
    found = []
    for value in pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(value, fx.Node) and value.op == "get_attr":
            inner = getattr(gm, str(value.target), None)
            if isinstance(inner, fx.GraphModule) and CLOSED not in inner.meta:
                found.append((str(value.target), inner))
    return found


def all_graphs(gm: fx.GraphModule, prefix: str = "") -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield ``gm`` and every graph inside it, each with its dotted name."""
    yield prefix, gm
    for node in gm.graph.nodes:
        if is_higher_order(node):
            for name, inner in subgraphs(gm, node):
                yield from all_graphs(inner, f"{prefix}.{name}" if prefix else name)
