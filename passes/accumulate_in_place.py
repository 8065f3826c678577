"""accumulate_in_place: with several micro-batches per update, each gradient is added to its sum where it is computed.

``gradients, found = unscale([g_1, …])``  →  ``addcmul_(sum_i, cast(g_i, f32), 1 / scale)`` right behind each ``g_i``,
and ``found = where(all_finite([sum_1, …]), found, 1)``. The sums are inputs: the parameters' own ``.grad``.

So the gradients of one micro-batch never all exist next to the sums, just as under autograd. The graph is not
functional afterwards; Inductor, which plans its memory by itself, doesn't need this pass. A graph with a gradient
that is rounded again, or a sparse one, is left alone.

Requires: scaled; the eager backend, several micro-batches per update, a micro-batch whose gradients are not reduced
over processes, no activation checkpointing. Ensures: accumulated. A second run changes nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.kernels import all_finite as _defines_all_finite  # noqa: F401
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import ACCUMULATES, ADDS_ONLY, EAGER, RECOMPUTES_NOTHING
from amp_compiler.rewrite.facts import ACCUMULATED, SCALED

aten = torch.ops.aten


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    graph, roles = gm.graph, gm.meta[ir.ROLE]
    found_op = ir.unscale_of(gm)
    if found_op is None:
        return False
    op, given, places = found_op
    _, inverse, found = op.args
    assert isinstance(inverse, fx.Node)
    mode = ir.fake_mode(graph)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    primals = {n.meta[ir.ROLE].index: n for n in inputs if n.meta[ir.ROLE].kind == "primal"}
    next(n for n in graph.nodes if n.op != "placeholder").prepend(inverse)
    last = next(iter(reversed(graph.nodes)))
    sums: list[fx.Node] = []
    for place, gradient in zip(places, given, strict=True):
        primal = primals[roles[place].index]
        total = ir.retype(primal.meta["val"], last.args[0][place].meta["val"].dtype)
        sums.append(ir.add_input(graph, f"sum_{primal.name}", ir.Role("sum", roles[place].index), total))
        with graph.inserting_before(op) if gradient.op == "placeholder" else graph.inserting_after(gradient):
            wide = gradient
            if gradient.meta["val"].dtype in ir.LOW_DTYPES:
                wide = ir.call(graph, mode, aten._to_copy.default, (gradient,), {"dtype": torch.float32})
        with graph.inserting_before(op) if wide.op == "placeholder" else graph.inserting_after(wide):
            ir.call(graph, mode, aten.addcmul_.default, (sums[-1], wide, inverse), {})
    with graph.inserting_before(op):
        finite = ir.call(graph, mode, torch.ops.amp.all_finite.default, (sums,), {})
        found_now = ir.call(graph, mode, aten.where.ScalarOther, (finite, found, 1.0), {})
    next(user for user in op.users if user.args[1] == 1).replace_all_uses_with(found_now)
    last.args = (tuple(r for i, r in enumerate(last.args[0]) if i not in places),)
    gm.meta[ir.ROLE] = tuple(role for i, role in enumerate(roles) if i not in places)
    graph.eliminate_dead_code()
    gm.recompile()
    return True


PASS = Pass(
    "accumulate_in_place", Dialect.FUNCTIONAL, requires=(SCALED,),
    ensures=(ACCUMULATED,), run=run, when=(EAGER, ACCUMULATES, ADDS_ONLY, RECOMPUTES_NOTHING),
)  # fmt: skip
