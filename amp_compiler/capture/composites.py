"""Composite ops under ``Policy.torch``: of those that it does not list, autocast sees the ops inside, and so do graphs.

torch 2.13 internals, and why: ``_dispatch_get_registrations_for_dispatch_key`` is the only list of composite ops, and
``OpOverload.decompose`` runs the C++ body of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx.traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .. import ir
from ..common.torch_names import OpOverload, pytree
from ..policy import Policy
from ..policy.ops.names import find_row
from ..policy.ops.row import OpClass
from ..policy.ops.torch_lists import LISTS

Decompositions = dict[Any, Callable[..., Any]]

#: composites that a trace must not decompose: the C++ body of the first reads a dtype, which would stay fp32
#: for good; that of the second stops gradients, which no node would show
KEEP_WHOLE = ("rms_norm", "cosine_similarity")
#: composites that only move values, but with an op that autocast lists (reflection_pad2d)
HOLDS_LISTED = ("pad",)


def decompositions(policy: Policy) -> Decompositions:
    """Return the composite ops that autocast looks into, each with its body; none unless the policy is autocast's."""
    if policy.autocast_device is None:
        return {}
    listed = frozenset().union(*LISTS[policy.autocast_device].values())
    table: Decompositions = {}
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        if not qualified.startswith("aten::"):
            continue
        name = qualified.removeprefix("aten::")
        row = find_row(name.split(".")[0])
        op = _overload(name)
        if name in listed or row is None or row.cls is OpClass.KEEP or row.name in KEEP_WHOLE or op is None:
            continue
        if row.cls is OpClass.EXACT and row.name not in HOLDS_LISTED:
            continue  # it only moves values: autocast casts nothing inside it
        table[op] = op.decompose
    return table


def expand(gm: fx.GraphModule, policy: Policy) -> None:
    """Replace the composite ops of a graph that ``torch.export`` has made by the ops inside of them, in place."""
    table = decompositions(policy)
    for _, inner in ir.all_graphs(gm):
        found = [node for node in inner.graph.nodes if node.op == "call_function" and node.target in table]
        for node in found:
            _expand(inner.graph, node, table)
        if found:
            inner.recompile()


def _expand(graph: fx.Graph, node: fx.Node, table: Decompositions) -> None:
    given = node.all_input_nodes

    def body(*values: Any) -> Any:
        by_node = dict(zip(given, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), by_node.__getitem__)
        return table[node.target](*args, **kwargs)

    with ir.fake_mode(graph):
        traced = make_fx(body, decomposition_table=table, pre_dispatch=True)(*(n.meta["val"] for n in given))
    traced.graph.eliminate_dead_code()
    if any(n.op == "get_attr" for n in traced.graph.nodes):
        return  # a constant of the body: the op stays whole, and nothing of it is changed
    places = [n for n in traced.graph.nodes if n.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(places, given, strict=True))
    with graph.inserting_before(node):
        result: Any = graph.graph_copy(traced.graph, values)
    for new in values.values():
        if new not in given:
            new.meta = {**node.meta, "val": new.meta["val"]}
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    for user in list(node.users):
        place: Any = user.args[1]
        user.replace_all_uses_with(pytree.tree_leaves(result)[place])
        graph.erase_node(user)
    graph.erase_node(node)


def _overload(name: str) -> OpOverload | None:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, OpOverload) else None
