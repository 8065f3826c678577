"""fold_constants: compute once, at conversion, what the model computes from its weights alone.

``conv1d(x, mul(div(v, norm(v)), g))``  →  ``conv1d(x, v_value)``: weight norm and other parametrizations, masks and
tables made from buffers. The value is stored instead of the weights that it is computed from.

Left alone: ops that only move a weight's values (a transpose costs nothing); a result that is random, written to, of
changing size, or that follows a dtype (``buffer.to(x.dtype)`` is decided later); and a result that would make the model
larger by more than 1 KiB because the weights have other readers.

Requires: normalized, and ``ctx.weights``: without them it does nothing. Ensures: normalized. A second run changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.torch_names import OpOverload, pytree, schema_of
from amp_compiler.ir.weights import Weights, drop_unread, moves
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import NORMALIZED

ROOM = 1 << 10  # bytes that one folded result may add to the model
#: ops whose result does not depend on their arguments' values
_UNKNOWN = ("empty_like", "new_empty", "new_empty_strided", "_assert_tensor_metadata")


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    if ctx.weights is None or not ctx.policy.rewrites or ctx.policy.autocast_device is not None:
        return False
    fold = _Fold(gm.graph, ctx.weights)
    modified = False
    for node in fold.roots():
        modified |= fold.root(node)
    if modified:
        _drop_dead(gm.graph, fold.known)
        drop_unread(gm.graph, ctx.weights)
        gm.recompile()
    return modified


class _Fold:
    def __init__(self, graph: fx.Graph, weights: Weights) -> None:
        self.graph, self.weights = graph, weights
        self.untouched = ir.written_nodes(graph) | ir.output_nodes(graph)
        fixed = [n for n in weights.fixed(graph) if ir.CONSTANT not in n.meta]
        self.leaves: dict[fx.Node, frozenset[fx.Node]] = {n: frozenset((n,)) for n in fixed}
        for node in graph.nodes:
            if node.op == "call_function" and node not in self.untouched and self.is_constant(node):
                self.leaves[node] = frozenset().union(*(self.leaves[a] for a in node.all_input_nodes))
        self.known = set(self.leaves)

    def is_constant(self, node: fx.Node) -> bool:
        inputs = node.all_input_nodes
        if not inputs or not all(a in self.leaves for a in inputs):
            return False
        if ir.is_getitem(node):
            return True
        target, origin = node.target, ir.origin(node)
        if not isinstance(target, OpOverload) or target.namespace != "aten" or schema_of(target).is_mutable:
            return False
        if torch.Tag.nondeterministic_seeded in target.tags or ir.op_name(node) in _UNKNOWN:
            return False
        if origin is not None and (origin.follows or origin.numbers or origin.unsure):
            return False
        values = ir.tensor_outputs(node)
        return bool(values) and all(v is not None and all(isinstance(s, int) for s in v.shape) for v in values)

    def roots(self) -> list[fx.Node]:
        """Return the constant results that other ops read, except those that only move one weight's values."""
        return [
            n for n in self.leaves
            if n.op == "call_function" and ir.tensor_of(n) is not None and not self.is_moved_weight(n)
            and any(u not in self.leaves for u in n.users)
        ]  # fmt: skip

    def is_moved_weight(self, node: fx.Node) -> bool:
        while node.op != "placeholder" and (moves(node) or ir.is_getitem(node)):
            if ir.is_getitem(node):
                return False
            node = node.all_input_nodes[0]
        return node.op == "placeholder"

    def root(self, node: fx.Node) -> bool:
        leaves = self.leaves[node]
        value = ir.tensor_of(node)
        assert value is not None
        freed = [leaf for leaf in leaves if self.only_for(leaf, node)]
        if ir.nbytes(value) > sum(ir.nbytes(leaf.meta["val"]) for leaf in freed) + ROOM:
            return False
        in_order = (n for n in self.graph.nodes if n in leaves)  # so that names do not depend on memory addresses
        like = max(in_order, key=lambda leaf: ir.nbytes(leaf.meta["val"]))
        make = partial(_evaluate, _program(node), {leaf.name: self.weights[leaf].make for leaf in leaves})
        new = self.weights.add(self.graph, like, "value", make, value)
        readers = [u for u in node.users if u not in self.leaves]
        for user in readers:
            user.replace_input_with(node, new)
        return True

    def only_for(self, leaf: fx.Node, root: fx.Node) -> bool:
        """True if a weight is read for this result and for nothing else."""
        seen, todo = set(), list(leaf.users)
        while todo:
            node = todo.pop()
            if node is root or node in seen:
                continue
            if node not in self.leaves:
                return False
            seen.add(node)
            todo += list(node.users)
        return all(node is root or set(node.users) <= seen | {root} for node in seen)


def _program(root: fx.Node) -> list[fx.Node]:
    """Return the nodes that compute a result, in order."""
    wanted, todo = {root}, [root]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in wanted:
                wanted.add(node)
                todo.append(node)
    return [_Step(n) for n in root.graph.nodes if n in wanted]  # type: ignore[misc]


class _Step:
    """A copy of a node: it may be removed from the graph before its value is computed."""

    def __init__(self, node: fx.Node) -> None:
        self.op, self.target, self.name = node.op, node.target, node.name
        self.args, self.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Name(n.name))


class _Name(str):
    """The name of a node among a step's arguments."""


def _evaluate(steps: list[Any], leaves: dict[str, Callable[[], torch.Tensor]]) -> torch.Tensor:
    values: dict[str, Any] = {}
    with torch.no_grad():
        for step in steps:
            if step.op == "placeholder":
                values[step.name] = leaves[step.name]().detach()
            else:
                args, kwargs = pytree.tree_map_only(_Name, values.__getitem__, (step.args, step.kwargs))
                values[step.name] = step.target(*args, **kwargs)
    result: torch.Tensor = values[steps[-1].name]
    return result.contiguous() if not result.is_contiguous() else result


def _drop_dead(graph: fx.Graph, known: set[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if node in known and node.op == "call_function" and not node.users:
            graph.erase_node(node)


PASS = Pass("fold_constants", Dialect.PRE_DISPATCH, requires=(NORMALIZED,), ensures=(NORMALIZED,), run=run)
