"""Which values of a graph are one piece of memory, which are written to, and which the model keeps between calls."""

from __future__ import annotations

from torch import fx

from .. import ir
from ..common.torch_names import pytree


class Memory:
    """The aliases of one graph. ``written``: every node whose memory something writes to."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.written = ir.written_nodes(gm.graph)
        self._classes = ir.alias_classes(gm.graph) if self.written else {}

    def is_view(self, node: fx.Node) -> bool:
        """True for a node that is written to and may be memory of one of its arguments."""
        if node not in self.written or ir.mutated_args(node):
            return False
        return any(self._classes[node] == self._classes[a] for _, a in ir.tensor_args(node))

    def shared_with(self, node: fx.Node) -> list[fx.Node]:
        """All nodes that may be one piece of memory with ``node``, which is written to; the first one made it."""
        return [n for n, number in self._classes.items() if number == self._classes[node]]

    def shows_that_it_is(self, cast: fx.Node) -> bool:
        """Whether it can be seen that a cast to the same dtype gave back its input: one of the two is written to and
        the other read afterwards. In low precision the cast would be a copy, and the write lost."""
        members = self.shared_with(cast)
        behind = {cast}
        for node in members:
            if any(a in behind for _, a in ir.tensor_args(node)):
                behind.add(node)
        order = {n: k for k, n in enumerate(self.gm.graph.nodes)}
        for node in members:
            for user in node.users:
                written = {a for name, a in ir.tensor_args(user) if name in ir.mutated_args(user)}
                if node in written:
                    other = [m for m in members if (m in behind) != (node in behind)]
                    if any(m.op != "call_function" or order[u] > order[user] for m in other for u in m.users):
                        return True
        return False


def kept_between_calls(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes between a value that the model keeps (a counter in a buffer) and the one that replaces it."""
    nodes = list(gm.graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    results = pytree.tree_leaves(nodes[-1].args[0]) if nodes and nodes[-1].op == "output" else []
    found: set[fx.Node] = set()
    for new, old in gm.meta.get(ir.STATE, []):
        after, before = {places[old]}, {results[new]}
        for node in nodes:
            if any(a in after for a in node.all_input_nodes):
                after.add(node)
        for node in reversed(nodes):
            if any(u in before for u in node.users):
                before.add(node)
        found |= after & before
    return found
