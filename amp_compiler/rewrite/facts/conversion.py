"""Facts about the graph of a conversion, where the values of weights are known."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ... import ir
from ...common.torch_names import pytree
from ...ir.weights import moves
from ..base import Context, Dialect, Fact, Place


def _frozen(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """No rounding of a weight is left to run time, but for those that the low dtype cannot hold."""
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
    """What reads a weight, also behind ops that only move its values and take nothing else."""
    for user in node.users:
        yield user
        if moves(user) and len(user.all_input_nodes) == 1:
            yield from _moved(user)


FROZEN = Fact(
    "frozen", Dialect.PRE_DISPATCH,
    "No rounding of a weight is left to run time, but for weights that the low dtype cannot hold.",
    check=_frozen, made_by="freeze_parameters", inside=False,
)  # fmt: skip
