"""Select a part of a graph: the nodes of some modules, with what they read and what reads them."""

from __future__ import annotations

from ...common.errors import ArgumentError
from ...common.messages import nearest_path, suggestion
from ...ir.view import INPUTS, GraphView, NodeView
from ...policy import matches


def modules(view: GraphView) -> list[str]:
    """Return the module paths of a graph, including modules that only contain others."""
    found: dict[str, None] = {}
    for node in view.nodes:
        parts = node.module.split(".") if node.module else []
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]))
    return list(found)


def in_module(view: GraphView, pattern: str) -> GraphView:
    """Return the nodes of the modules that match a pattern, and the parameters and inputs that they read."""
    paths = modules(view)
    if not any(matches(pattern, path) for path in paths):
        hint = nearest_path(pattern, paths)
        raise ArgumentError(f"The module pattern {pattern!r} matches no module of the graph.", hint=hint)
    keep = {n.name for n in view.nodes if matches(pattern, n.module) and n.kind not in INPUTS}
    read = {name for n in view.nodes if n.name in keep for name in n.inputs}
    keep |= {n.name for n in view.nodes if n.name in read and n.kind in INPUTS}
    return view.part(keep)


def find(view: GraphView, name: str) -> NodeView:
    """Return the node of that name; raise with the closest match as a hint if there is none."""
    if name in view.by_name:
        return view.by_name[name]
    labelled = [n for n in view.nodes if n.label == name]
    if labelled:
        return labelled[0]
    hint = suggestion(name, view.by_name, most=3, otherwise="`dump` lists the names.")
    raise ArgumentError(f"The graph has no node {name!r}.", hint=hint)
