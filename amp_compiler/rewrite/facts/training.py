"""Facts about the joint graph of a whole training step."""

from __future__ import annotations

from typing import Any

from torch import fx

from ... import ir
from ...common.torch_names import pytree
from ..base import Context, Dialect, Fact, Place


def _results(gm: fx.GraphModule) -> list[Any]:
    last = next(iter(reversed(gm.graph.nodes)))
    return pytree.tree_leaves(last.args[0], is_leaf=lambda x: x is None)


def _step(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """Every input and output of a training step's graph has a role."""
    for node in gm.graph.nodes:
        if node.op == "placeholder" and not isinstance(node.meta.get(ir.ROLE), ir.Role):
            place.fail("is an input without a role.", node)
    results, roles = _results(gm), gm.meta[ir.ROLE]
    if len(results) != len(roles):
        place.fail(f"has {len(results)} values for {len(roles)} roles.", next(iter(reversed(gm.graph.nodes))))


def _scaled(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """Every gradient is scaled and unscaled exactly once, and nothing else depends on the scale.

    On each path from the loss's tangent, the scale and ``amp::unscale`` are counted. What autograd computes in between
    is linear in the tangent, so a gradient with one of each on all its paths is the true gradient.
    """
    _step(gm, ctx, place)
    inputs = {n.meta[ir.ROLE].kind: n for n in gm.graph.nodes if n.op == "placeholder"}
    tangent, scale = inputs["tangent"], inputs["scale"]
    met: dict[fx.Node, set[tuple[int, int]]] = {tangent: {(0, 0)}}
    for node in gm.graph.nodes:
        if ir.op_name(node) == "amp::unscale":
            inverse = node.args[1]
            if ir.op_name(inverse) != "reciprocal" or inverse.args[0] is not scale:
                place.fail(f"unscales by '{inverse}', which is not one over the scale.", node)
            continue
        if node.op != "call_function":
            continue
        times = {pair for source in node.all_input_nodes for pair in met.get(source, ())}
        if scale in node.all_input_nodes and tangent in node.all_input_nodes and ir.op_name(node) == "mul":
            times = {(scaled + 1, unscaled) for scaled, unscaled in times}
        elif scale in node.all_input_nodes:
            if ir.op_name(node) != "reciprocal" or any(ir.op_name(u) != "amp::unscale" for u in node.users):
                place.fail("uses the scale for something other than scaling and unscaling.", node)
        elif tangent in node.all_input_nodes:
            place.fail("uses the loss's tangent before it is scaled.", node)
        elif (given := _unscaled_by(node)) is not None:
            times = {(scaled, unscaled + 1) for scaled, unscaled in met.get(given, ())}
            if not times and not _is_zero(given):
                place.fail("is a gradient that does not depend on the loss's: it would be unscaled only.", given)
            times = times or {(1, 1)}
        if times:
            met[node] = times
    for role, node in zip(gm.meta[ir.ROLE], _results(gm), strict=True):
        times = met.get(node, set())
        if role.kind == "gradient" and times != {(1, 1)}:
            told = ", ".join(f"{s} times scaled and {u} times unscaled" for s, u in sorted(times)) or "never scaled"
            place.fail(f"is the gradient of input {role.index} and is {told} on its way from the loss.", node)
        if role.kind in ("mutation", "output") and times:
            place.fail(f"is {role.kind} {role.index} and depends on the loss's tangent.", node)


def _widened(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """No gradient leaves the graph in low precision."""
    for role, node in zip(gm.meta[ir.ROLE], _results(gm), strict=True):
        if role.kind == "gradient" and node.meta["val"].dtype in ir.LOW_DTYPES:
            place.fail(f"is the gradient of input {role.index} and leaves the graph in low precision.", node)


def _unscaled_by(node: fx.Node) -> fx.Node | None:
    """Return the gradient that was passed to ``amp::unscale``, for a node that is ``unscale(…)[0][i]``."""
    if not ir.is_getitem(node):
        return None
    gradients, place = node.args
    if not isinstance(gradients, fx.Node) or not ir.is_getitem(gradients) or gradients.args[1] != 0:
        return None
    op = gradients.args[0]
    if not isinstance(op, fx.Node) or ir.op_name(op) != "amp::unscale":
        return None
    given = pytree.tree_leaves(op.args[0])[int(str(place))]
    assert isinstance(given, fx.Node)
    return given


def _is_zero(node: fx.Node) -> bool:
    name, args = ir.op_name(node), dict(ir.schema_args(node))
    filled = name.startswith("full") and bool(args.get("fill_value") == 0)
    return filled or name in ("zeros", "zeros_like", "new_zeros")


def _none_left(gm: fx.GraphModule, place: Place) -> None:
    left = ir.unscale_of(gm)
    if left is not None:
        place.fail("unscales gradients into new memory, but could do it in place.", left[0])


def _in_place(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """Each gradient is unscaled in place once, and nothing else shares its memory."""
    op = next((n for n in gm.graph.nodes if ir.op_name(n) == "amp::unscale_"), None)
    if op is None:
        _none_left(gm, place)
        return
    own = pytree.tree_leaves(op.args[0])
    classes = ir.alias_classes(gm.graph)
    gradients = [n for role, n in zip(gm.meta[ir.ROLE], _results(gm), strict=True) if role.kind == "gradient"]
    if own != gradients:
        place.fail(f"unscales {own}, but the gradients are {gradients}.", op)
    others = [n for n in gm.graph.nodes if n.op == "placeholder" and n is not op]
    others += [n for role, n in zip(gm.meta[ir.ROLE], _results(gm), strict=True) if role.kind != "gradient"]
    held = [classes[n] for n in (*own, *others)]
    for node in own:
        if held.count(classes[node]) > 1:
            place.fail("is unscaled in place and shares its memory with another input or output.", node)


def _accumulated(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """Each sum is added to once, by a gradient times the inverse of the scale."""
    _none_left(gm, place)
    for node in gm.graph.nodes:
        if node.op != "placeholder" or node.meta[ir.ROLE].kind != "sum":
            continue
        writes = [u for u in node.users if "self" in ir.mutated_args(u) and u.args[0] is node]
        if len(writes) != 1 or ir.op_name(writes[0].args[2]) != "reciprocal":
            place.fail(f"is a sum of gradients that {len(writes)} ops write to, or not unscaled.", node)


def _hoisted(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """No cast of a parameter is left in the graph that runs for every micro-batch."""
    frozen = ir.written_nodes(gm.graph) | ir.output_nodes(gm.graph)
    for node in gm.graph.nodes:
        if ir.is_float_cast(node) and node not in frozen and ir.cast_source(node).op == "placeholder":
            role = ir.cast_source(node).meta.get(ir.ROLE)
            if role is not None and role.kind == "primal" and role.index in gm.meta[ir.PARAMETER]:
                place.fail("casts a parameter once per micro-batch.", node)


STEP = Fact(
    "step", Dialect.FUNCTIONAL,
    "Every input and output of a joint graph has a `Role` (primal, tangent, gradient, saved …).",
    check=_step, inside=False,
)  # fmt: skip
WIDENED = Fact(
    "widened", Dialect.FUNCTIONAL, "Every gradient leaves the graph in fp32, also that of a low-precision parameter.",
    check=_widened, made_by="widen_gradients", inside=False,
)  # fmt: skip
SCALED = Fact(
    "scaled", Dialect.FUNCTIONAL,
    "On every path from the loss's tangent to a gradient, the scale and `amp::unscale` occur exactly once, and nothing "
    "else depends on the scale.",
    check=_scaled, made_by="scale_loss", inside=False,
)  # fmt: skip
HOISTED = Fact(
    "hoisted", Dialect.FUNCTIONAL, "No cast of a parameter is left in the graph of a micro-batch.",
    check=_hoisted, made_by="hoist_weight_casts", inside=False,
)  # fmt: skip
ACCUMULATED = Fact(
    "accumulated", Dialect.FUNCTIONAL, "Each sum is added to once, by a gradient times the inverse of the scale.",
    check=_accumulated, made_by="accumulate_in_place", inside=False,
)  # fmt: skip
IN_PLACE = Fact(
    "in_place", Dialect.FUNCTIONAL, "Each gradient is unscaled once, in memory that nothing else shares.",
    check=_in_place, made_by="unscale_in_place", inside=False,
)  # fmt: skip
