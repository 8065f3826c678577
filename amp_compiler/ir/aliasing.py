"""Which nodes share memory, which memory is written to, and what the model keeps between calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..common.torch_names import OpOverload, pytree
from .graphs import operands, subgraphs
from .meta import STATE
from .schema import is_getitem, is_higher_order, mutated_args, schema_args, signature, tensor_args

#: composite ops that may return their input itself when there is nothing to do, without saying so in their schema
MAY_RETURN_INPUT = frozenset({
    "reshape", "contiguous", "flatten", "to", "type_as", "dropout", "feature_dropout", "alpha_dropout", "reshape_as",
    "unflatten", "ravel", "resolve_conj", "resolve_neg", "atleast_1d", "atleast_2d", "atleast_3d", "expand_as",
    "view_as", "narrow", "swapaxes", "swapdims", "moveaxis", "movedim", "broadcast_to", "pad", "real", "sum_to_size",
    "feature_alpha_dropout",
})  # fmt: skip

#: ops of which each result has memory of its own; no schema promises that, so any other op's results may share theirs
SEPARATE_RESULTS = frozenset({
    torch.ops.aten.native_batch_norm_backward.default, torch.ops.aten.native_layer_norm_backward.default,
    torch.ops.aten.native_group_norm_backward.default, torch.ops.aten._native_batch_norm_legit_functional.default,
})  # fmt: skip


def alias_classes(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return a number for each tensor node, equal for nodes that may share memory: views, in-place results, selections.
    """
    parent: dict[fx.Node, fx.Node] = {}
    results: dict[tuple[fx.Node, Any], fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while (up := parent.setdefault(node, node)) is not node:
            parent[node] = parent.setdefault(up, up)
            node = up
        return node

    for node in graph.nodes:
        find(node)
        if is_getitem(node) and isinstance(source := node.args[0], fx.Node):
            if source.target in SEPARATE_RESULTS:
                source = results.setdefault((source, node.args[1]), node)
            parent[find(node)] = find(source)
        elif node.op == "call_function" and isinstance(node.target, OpOverload):
            told = signature(node.target)
            shares = {*told.aliased, "self", "input"} if told.name in MAY_RETURN_INPUT else told.aliased
            for name, value in schema_args(node) if shares else ():
                if name in shares and isinstance(value, fx.Node):
                    parent[find(node)] = find(value)
    numbers: dict[fx.Node, int] = {}
    return {node: numbers.setdefault(find(node), len(numbers)) for node in graph.nodes}


def written_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return every node whose memory some node of the graph writes to, including views."""
    written = {a for n in graph.nodes if (names := mutated_args(n)) for name, a in tensor_args(n) if name in names}
    written |= {a for n in graph.nodes if is_higher_order(n) for a in _written_by_bodies(n)}
    if not written:
        return set()
    classes = alias_classes(graph)
    touched = {classes[n] for n in written}
    return {n for n, number in classes.items() if number in touched}


def _written_by_bodies(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments of a higher-order node that a graph inside it writes to."""
    owner = node.graph.owning_module
    for _, body in subgraphs(owner, node) if owner is not None else ():
        written = written_nodes(body.graph)
        yield from (given for place, given in operands(node, body) if place in written)


def output_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return every node that may share memory with an output of the graph."""
    last = next(iter(reversed(graph.nodes)))
    results = {n for n in pytree.tree_leaves(last.args) if isinstance(n, fx.Node)}
    classes = alias_classes(graph)
    numbers = {classes[n] for n in results}
    return {n for n, number in classes.items() if number in numbers}


class Aliases:
    """The aliases of one graph. ``written``: every node whose memory something writes to."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.written = written_nodes(gm.graph)
        self._classes = alias_classes(gm.graph) if self.written else {}

    def is_view(self, node: fx.Node) -> bool:
        """True for a node that is written to and may share memory with one of its arguments."""
        if node not in self.written or mutated_args(node):
            return False
        return any(self._classes[node] == self._classes[a] for _, a in tensor_args(node))

    def shared_with(self, node: fx.Node) -> list[fx.Node]:
        """Return all nodes that may share memory with ``node``, which is written to; the first one allocated it."""
        return [n for n, number in self._classes.items() if number == self._classes[node]]

    def observes_alias(self, cast: fx.Node) -> bool:
        """True if the program can observe that this cast to the same dtype aliased its input: one of the two is written
        to and the other read afterwards. In low precision the cast would be a copy, and the write would be lost."""
        members = self.shared_with(cast)
        behind = {cast}
        for node in members:
            if any(a in behind for _, a in tensor_args(node)):
                behind.add(node)
        order = {n: k for k, n in enumerate(self.gm.graph.nodes)}
        for node in members:
            for user in node.users:
                written = {a for name, a in tensor_args(user) if name in mutated_args(user)}
                if node in written:
                    other = [m for m in members if (m in behind) != (node in behind)]
                    if any(m.op != "call_function" or order[u] > order[user] for m in other for u in m.users):
                        return True
        return False


def kept_between_calls(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes between a value that the model keeps (a counter in a buffer) and the one that replaces it."""
    nodes = list(gm.graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    results = pytree.tree_leaves(nodes[-1].args[0]) if nodes and nodes[-1].op == "output" else []
    found: set[fx.Node] = set()
    for new, old in gm.meta.get(STATE, []):
        after, before = {places[old]}, {results[new]}
        for node in nodes:
            if any(a in after for a in node.all_input_nodes):
                after.add(node)
        for node in reversed(nodes):
            if any(u in before for u in node.users):
                before.add(node)
        found |= after & before
    return found
