"""What the twin revealed about a graph, kept so that a re-compilation needs no second twin.

A frame is compiled again for a new batch size, a new length or another mode. If the ops, their lines, their dtypes and
what they read are the same as before, then so is what the code asked for. Only names, dtypes and numbers are kept: no
node, no tensor.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..common.torch_names import pytree
from .meta import ORIGIN, Origin, origin
from .provenance import module_path, source_line
from .schema import is_higher_order, op_name, schema_args
from .values import tensor_outputs

Keys = tuple[tuple[Any, ...], ...]


class Verdicts:
    """What the twin revealed about the nodes of one graph, for graphs with the same ``keys``."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._found: list[tuple[tuple[str, str], Origin, list[Any]]] | None = None

    @property
    def are_known(self) -> bool:
        return self._found is not None

    def learn(self, gm: fx.GraphModule) -> None:
        """Keep what the twin revealed about each node of a graph, if it is certain of all of them."""
        nodes = _without_sizes(gm.graph)
        places = {node.name: str(number) for number, node in enumerate(nodes)}
        places |= {n.name: places[_shown(n).name] for n in gm.graph.nodes if _shows_all(n)}
        found = []
        for node in nodes:
            known = origin(node)
            if known is None or known.unsure:
                return
            if any(name and name not in places for name in (known.of, known.numbers_of)):
                return
            kept = replace(known, of=places.get(known.of, ""), numbers_of=places.get(known.numbers_of, ""))
            found.append((_what(node), kept, _numbers(node, known)))
        self._found = found

    def apply(self, gm: fx.GraphModule) -> bool:
        """Write on the nodes of a graph what was revealed about those of the first; False, with nothing written, if it
        has other nodes."""
        nodes = _without_sizes(gm.graph)
        if self._found is None or [_what(node) for node in nodes] != [what for what, *_ in self._found]:
            return False
        if any(_numbers(node, known) != mine for node, (_, known, mine) in zip(nodes, self._found, strict=True)):
            return False
        for node in gm.graph.nodes:
            node.meta[ORIGIN] = Origin()  # a number; slices come below
        for node, (_, known, _) in zip(nodes, self._found, strict=True):
            of, numbers_of = (nodes[int(place)].name if place else "" for place in (known.of, known.numbers_of))
            node.meta[ORIGIN] = replace(known, of=of, numbers_of=numbers_of)
        for node in gm.graph.nodes:
            if _shows_all(node):
                node.meta[ORIGIN] = Origin(twin=node.args[0].meta[ORIGIN].twin)
        return True


def keys_of(graph: fx.Graph) -> Keys | None:
    """Return what identifies a captured graph, sizes aside; None if it has graphs inside, which are not looked at."""
    nodes = _without_sizes(graph)
    if any(is_higher_order(node) for node in nodes):
        return None
    places: dict[fx.Node, int] = {node: number for number, node in enumerate(nodes)}
    return tuple(_key(node, places) for node in nodes)


def _key(node: fx.Node, places: dict[fx.Node, int]) -> tuple[Any, ...]:
    name = node.name if node.op == "placeholder" else _what(node)[1]
    dtypes = tuple(None if v is None else v.dtype for v in tensor_outputs(node)) if node.op != "output" else ()
    read = tuple(places[n] for n in map(_shown, node.all_input_nodes) if n in places)
    literals = tuple(str(leaf) for leaf in pytree.tree_leaves((node.args, node.kwargs)) if _may_come_from_dtype(leaf))
    return node.op, name, source_line(node), module_path(node), dtypes, read, literals


def _may_come_from_dtype(literal: Any) -> bool:
    """True for dtypes and for numbers of the size of a dtype's limits; a probability changes with the mode."""
    is_limit = isinstance(literal, float) and literal != 0 and not 1e-3 <= abs(literal) <= 1e3
    return is_limit or isinstance(literal, torch.dtype)


def _what(node: fx.Node) -> tuple[str, str]:
    return node.op, op_name(node) if node.op == "call_function" else ""


def _numbers(node: fx.Node, known: Origin) -> list[Any]:
    """Return the numbers of a node that differ in its twin."""
    named = dict(schema_args(node)) if known.numbers else {}
    return [named.get(name) for name, _ in known.numbers]


def _without_sizes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes without those that a graph has only where sizes are dynamic: what computes sizes, and slices of
    all elements (a tracer leaves them out where it knows the size)."""
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return [n for n in graph.nodes if not isinstance(n.meta.get("val"), numbers) and not _shows_all(n)]


def _shows_all(node: fx.Node) -> bool:
    """True for ``x[:]``."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return False
    named = dict(schema_args(node))
    whole = named.get("start") in (0, None) and named.get("end") in (sys.maxsize, None)
    return whole and named.get("step", 1) in (1, None)


def _shown(node: fx.Node) -> fx.Node:
    """Return the node whose elements a slice of all elements shows."""
    while _shows_all(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
