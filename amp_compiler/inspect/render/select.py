"""A part of a graph: the nodes of some modules, with what they read and what reads them."""

from __future__ import annotations

import difflib

from ...common.errors import ArgumentError
from ...ir.view import INPUTS, GraphView, NodeView
from ...policy import matches


def modules(view: GraphView) -> list[str]:
    """The module paths of a graph, those included that only hold others."""
    found: dict[str, None] = {}
    for node in view.nodes:
        parts = node.module.split(".") if node.module else []
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]))
    return list(found)


def in_module(view: GraphView, pattern: str) -> GraphView:
    """The nodes of the modules that a pattern names, and the parameters and inputs that they read."""
    paths = modules(view)
    if not any(matches(pattern, path) for path in paths):
        hint = nearest_module(view, pattern)
        raise ArgumentError(f"The module pattern {pattern!r} matches no module of the graph. {hint}")
    keep = {n.name for n in view.nodes if matches(pattern, n.module) and n.kind not in INPUTS}
    read = {name for n in view.nodes if n.name in keep for name in n.inputs}
    keep |= {n.name for n in view.nodes if n.name in read and n.kind in INPUTS}
    return view.part(keep)


def nearest_module(view: GraphView, pattern: str) -> str:
    """The end of an error about a pattern that matches nothing: the nearest path, or what paths look like."""
    paths = modules(view)
    near = difflib.get_close_matches(pattern.rstrip(".*"), paths, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Paths look like: {', '.join(paths[:4]) or '(none)'}."


def find(view: GraphView, name: str) -> NodeView:
    """The node of that name; an unknown one is an error that suggests the nearest."""
    if name in view.by_name:
        return view.by_name[name]
    labelled = [n for n in view.nodes if n.label == name]
    if labelled:
        return labelled[0]
    near = difflib.get_close_matches(name, view.by_name, n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else " `dump` lists the names."
    raise ArgumentError(f"The graph has no node {name!r}.{hint}")
