"""scale_loss: scale the gradient of the loss, unscale every gradient in fp32, and check all for inf and NaN at once.

1. ``backward(tangent)``            →  ``backward(tangent * scale)``
2. ``gradient_i = cast(g_i, f32)``  →  ``gradients, found = amp.unscale([g_1, g_2, …], 1 / scale, found)``: one op for
   all of them, which reads each gradient in the dtype that it was computed in
3. a gradient that leaves the graph in low precision, as that of a low parameter does, is cast back to its dtype
4. ``new = batch_norm statistics``  →  ``where(found, saved, new)``: a skipped update leaves the model's state as it was
   before the update (``saved`` differs from the input only when micro-batches are accumulated). Not where the step does
   so itself: on a CPU the flag can be read, and the new state is written or not

``found`` is the overflow flag. It is also an input: 1 if an earlier micro-batch of the same update was not finite.

Requires: functional, step (a joint graph whose inputs and outputs carry roles); a loss scale. Ensures: scaled.
A second run changes nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.kernels import unscale as _defines_amp_unscale  # noqa: F401
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import SCALES_LOSS
from amp_compiler.rewrite.facts import FUNCTIONAL, SCALED, STEP

aten = torch.ops.aten


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    roles: tuple[ir.Role, ...] = gm.meta[ir.ROLE]
    if any(role.kind == "found" for role in roles):
        return False
    graph, mode = gm.graph, ir.fake_mode(gm.graph)
    inputs = {n.meta[ir.ROLE]: n for n in graph.nodes if n.op == "placeholder"}
    (tangent,) = [n for role, n in inputs.items() if role.kind == "tangent"]
    of_loss = _value(tangent)
    with mode:
        one = torch.empty((), dtype=torch.float32, device=of_loss.device)
        flag = torch.empty(1, dtype=torch.float32, device=of_loss.device)
    scale = ir.add_input(graph, "scale", ir.Role("scale"), one)
    found = ir.add_input(graph, "found", ir.Role("found"), flag)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return ir.call(graph, mode, target, args, kwargs)

    def cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if _value(node).dtype == dtype else call(aten._to_copy.default, node, dtype=dtype)

    users = list(tangent.users)
    with graph.inserting_before(min(users)):
        scaled = cast(call(aten.mul.Tensor, tangent, scale), of_loss.dtype)
    for user in users:
        user.replace_input_with(tangent, scaled)

    last = next(iter(reversed(graph.nodes)))
    results: list[Any] = list(last.args[0])
    places = [i for i, role in enumerate(roles) if role.kind == "gradient"]
    with graph.inserting_before(last):
        inverse = call(aten.reciprocal.default, scale)
        unscaled = call(torch.ops.amp.unscale.default, [_computed(results[i]) for i in places], inverse, found)
        gradients = call(operator.getitem, unscaled, 0)
        for number, place in enumerate(places):
            primal = inputs[ir.Role("primal", roles[place].index)]
            results[place] = cast(call(operator.getitem, gradients, number), _value(results[place]).dtype)
            results[place]._rename(f"grad_{primal.name}")
        found_now = call(operator.getitem, unscaled, 1)
        restored = () if ctx.restores_outside else gm.meta[ir.RESTORED]
        if restored:
            skipped = call(aten.view.default, call(aten.ne.Scalar, found_now, 0), [])
        for role in restored:
            primal, place = inputs[ir.Role("primal", role.index)], roles.index(role)
            saved = ir.add_input(graph, f"saved_{primal.name}", ir.Role("saved", role.index), _value(primal))
            results[place] = call(aten.where.self, skipped, saved, results[place])
    last.args = ((*results, found_now),)
    gm.meta[ir.ROLE] = (*roles, ir.Role("found"))
    graph.eliminate_dead_code()
    gm.recompile()
    return True


def _value(node: fx.Node) -> torch.Tensor:
    value = ir.tensor_of(node)
    assert value is not None
    return value


def _computed(gradient: fx.Node) -> fx.Node:
    """Return the gradient in the dtype that it was computed in: ``amp::unscale`` widens what it reads."""
    widened = ir.is_float_cast(gradient) and _value(gradient).dtype == torch.float32
    return ir.cast_source(gradient) if widened and _value(ir.cast_source(gradient)).dtype in ir.LOW_DTYPES else gradient


PASS = Pass(
    "scale_loss", Dialect.FUNCTIONAL, requires=(FUNCTIONAL, STEP), ensures=(SCALED,), run=run, when=(SCALES_LOSS,)
)
