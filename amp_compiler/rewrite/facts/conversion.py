"""Facts about the graph of a conversion, where the values of weights are known."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ... import ir
from ...common.torch_names import pytree
from ...ir.weights import moves
from ..base import Context, Dialect, Fact, Place


def _frozen(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """No weight is rounded at run time, except those that low precision cannot represent."""
    if ctx.weights is None:
        return
    outputs = {n for n in pytree.tree_leaves(next(iter(reversed(gm.graph.nodes))).args) if isinstance(n, fx.Node)}
    for node in ctx.weights.fixed(gm.graph):
        if ctx.weights[node].path in ctx.weights.kept:
            continue
        for user in _moved(node):
            if ir.is_float_cast(user) and ir.cast_dtype(user) in ir.LOW_DTYPES and not (
                user in outputs or any(reader in outputs for reader in _moved(user))
            ):
                place.fail(f"rounds the weight {ctx.weights[node].path} each time.", user)


def _moved(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the readers of a weight, also through ops that only move its values."""
    for user in node.users:
        yield user
        if moves(user) and len(user.all_input_nodes) == 1:
            yield from _moved(user)


FROZEN = Fact(
    "frozen", Dialect.PRE_DISPATCH,
    "No weight is rounded at run time, except those that the low-precision dtype cannot represent.",
    check=_frozen, made_by="freeze_parameters", inside=False,
)  # fmt: skip
