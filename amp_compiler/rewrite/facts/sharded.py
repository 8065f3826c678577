"""Facts about the joint graph of a training step whose parameters are divided among processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ... import ir
from ...common.torch_names import OpOverload, pytree
from ..base import Context, Dialect, Fact, Place
from .parallel import REDUCED, collective

#: what may stand between the rows of a process and the gather
_PACKS = ("constant_pad_nd", "view", "cat", "_to_copy")


def first_of_backward(graph: fx.Graph) -> fx.Node:
    """The first node that depends on the loss's tangent; the output if none does."""
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.meta[ir.ROLE].kind == "tangent":
                behind.add(node)
        elif node.op == "output" or any(source in behind for source in node.all_input_nodes):
            found: fx.Node = node
            break
    return found


def remade(node: fx.Node) -> bool:
    """True for a view or a cast: cheap to make once more from the same parameter."""
    if ir.is_getitem(node):
        source = node.args[0]
        return isinstance(source, fx.Node) and remade(source)
    view = isinstance(node.target, OpOverload) and bool(node.target.is_view)
    return len(node.all_input_nodes) == 1 and (view or ir.is_float_cast(node))


def _scattered(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """Each gradient is reduced once and has the rows of this process; the flag is the maximum over the processes."""
    REDUCED.check(gm, ctx, place)
    assert ctx.sharding is not None
    primals = {n.meta[ir.ROLE]: n for n in gm.graph.nodes if n.op == "placeholder"}
    last = next(iter(reversed(gm.graph.nodes)))
    for role, node in zip(gm.meta[ir.ROLE], pytree.tree_leaves(last.args[0], is_leaf=lambda x: x is None), strict=True):
        if role.kind == "gradient":
            value = primals[ir.Role("primal", role.index)].meta["val"]
            rows = [ctx.sharding.own_rows(value.shape[0]), *value.shape[1:]] if value.dim() else []
            if list(node.meta["val"].shape) != rows:
                place.fail(f"is the gradient of input {role.index}, of which this process has {rows}.", node)
        if role.kind == "found":
            sent = node.args[0] if collective(node) == "wait_tensor" else None
            if not isinstance(sent, fx.Node) or collective(sent) != "all_reduce" or sent.args[1] != "max":
                place.fail("is the overflow flag of this process alone.", node)


def _gathered(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """What a process holds of a parameter is read by gathers only; none is wider, or lives longer, than it must."""
    assert ctx.sharding is not None
    for node in gm.graph.nodes:
        role = node.meta[ir.ROLE] if node.op == "placeholder" else None
        if role is not None and role.kind == "primal" and role.index in gm.meta[ir.SHARDED] and node.meta["val"].dim():
            _only_gathered(node, place)
    backward = first_of_backward(gm.graph)
    for node in gm.graph.nodes:
        if collective(node) == "all_gather_into_tensor":
            waits = [user for user in node.users if collective(user) == "wait_tensor"]
            if len(waits) != 1 or len(node.users) != 1:
                place.fail("is a gather that is not waited for once.", node)
            for part in _parts(waits[0]):
                readers = list(_readers(part))
                dtypes = {ir.cast_dtype(r) if ir.is_float_cast(r) else None for r in readers}
                if len(dtypes) == 1 and dtypes <= set(ir.LOW_DTYPES):
                    place.fail("is gathered wide, and all that read it round it to one low dtype.", part)
                late = [r for r in readers if not ir.in_backward(node) and not r < backward]
                if late and ctx.sharding.reshard_after_forward and "recompute" not in node.meta:
                    place.fail(f"is gathered for the forward, and {late[0].name} of the backward reads it.", part)


def _only_gathered(node: fx.Node, place: Place) -> None:
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user in seen or collective(user) == "all_gather_into_tensor":
                continue
            if ir.op_name(user) not in _PACKS:
                place.fail(f"reads the rows of {node.name} that one process has as if they were all.", user)
            seen.add(user)
            waiting.append(user)


def _parts(gathered: fx.Node) -> list[fx.Node]:
    """The parameters in what was gathered together: each is copied out of it, unless it is alone."""
    copies = [n for n in _readers(gathered) if n.target is torch.ops.aten.clone.default]
    return copies or [gathered]


def _readers(node: fx.Node) -> Iterator[Any]:
    """What reads a value, through views, and casts of it."""
    for user in node.users:
        if remade(user) and not ir.is_float_cast(user):
            yield from _readers(user)
        else:
            yield user


SCATTERED = Fact(
    "scattered", Dialect.FUNCTIONAL,
    "Every gradient is reduced over the processes exactly once, and a process has its rows of it; the overflow flag is "
    "that of all processes.",
    check=_scattered, made_by="scatter_gradients", inside=False,
)  # fmt: skip
GATHERED = Fact(
    "gathered", Dialect.FUNCTIONAL,
    "The rows of a parameter that a process has are read by gathers only, which are low where every reader is; what "
    "the forward gathers is not read by the backward, unless it is to stay.",
    check=_gathered, made_by="gather_parameters", inside=False,
)  # fmt: skip
