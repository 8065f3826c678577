"""Facts about the joint graph of a training step that several processes run together."""

from __future__ import annotations

from typing import Any

from torch import fx

from ... import ir
from ...common.torch_names import pytree
from ..base import Context, Dialect, Fact, Place

#: collectives that return an average or a sum over the group to every process, or a part of it
_REDUCES = ("all_reduce", "all_reduce_", "reduce_scatter_tensor")


def _results(gm: fx.GraphModule) -> list[Any]:
    last = next(iter(reversed(gm.graph.nodes)))
    return pytree.tree_leaves(last.args[0], is_leaf=lambda x: x is None)


def collective(node: Any) -> str:
    """Return the name of a collective op (``"all_reduce"``), or "" for any other node."""
    name = ir.op_name(node) if isinstance(node, fx.Node) and node.op == "call_function" else ""
    return name.rpartition("::")[2] if name.startswith("_c10d_functional::") else ""


def _reduced(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """Each path from the loss's tangent, or from a sum of earlier gradients, to a gradient has one reduction; the
    overflow flag is computed from the reduced gradients, so it is the same in every process."""
    met: dict[fx.Node, set[int]] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if node.meta[ir.ROLE].kind in ("tangent", "sum"):
                met[node] = {0}
            continue
        times = {count for source in node.all_input_nodes for count in met.get(source, ())}
        if collective(node) in _REDUCES:
            times = {count + 1 for count in times or {0}}  # zeros for a parameter without a gradient are reduced too
        if times:
            met[node] = times
    for role, node in zip(gm.meta[ir.ROLE], _results(gm), strict=True):
        times = met.get(node, set())
        if role.kind in ("gradient", "total") and times != {1}:
            told = " or ".join(str(count) for count in sorted(times)) or "never"
            place.fail(f"is the gradient of input {role.index} and is reduced {told} times on its way.", node)
        if role.kind == "found" and 0 in times:
            place.fail("is the overflow flag and depends on a gradient that is not reduced.", node)
    for node in gm.graph.nodes:
        if collective(node) in _REDUCES and not any(collective(user) == "wait_tensor" for user in node.users):
            place.fail("is a collective that nothing waits for.", node)


def _reduced_in_place(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    _reduced(gm, ctx, place)
    for node in gm.graph.nodes:
        if collective(node) == "all_reduce":
            place.fail("reduces into new memory, but could do it in place.", node)


REDUCED = Fact(
    "reduced", Dialect.FUNCTIONAL,
    "Every gradient is reduced over the processes exactly once; the overflow flag is that of the reduced gradients.",
    check=_reduced, made_by="reduce_gradients", inside=False,
)  # fmt: skip
REDUCED_IN_PLACE = Fact(
    "reduced_in_place", Dialect.FUNCTIONAL, "Buckets of gradients are reduced and unscaled in their own memory.",
    check=_reduced_in_place, made_by="reduce_in_place", inside=False,
)  # fmt: skip
