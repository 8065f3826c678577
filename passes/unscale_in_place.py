"""unscale_in_place: unscale gradients in place, in their own memory.

1. ``gradients, found = unscale([g_1, …])``  →  ``found = unscale_([cast(g_1, f32), …])``: each low gradient is widened
   right after it is computed, so that it can be freed, and no second set of gradients is written
2. a gradient that shares its memory (an expanded value, one tensor for two parameters, an input) is cloned first

The graph is not functional afterwards, so this is one of the last passes; Inductor accepts such a graph. A graph with a
sparse gradient is left alone, and so is one with a low-precision parameter whose gradient is unscaled in fp32 and
rounded again.

Requires: scaled; no activation checkpointing. Ensures: in_place. A second run changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import RECOMPUTES_NOTHING
from amp_compiler.rewrite.facts import IN_PLACE, SCALED


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    graph = gm.graph
    found_op = ir.unscale_of(gm)
    if found_op is None:
        return False
    op, given, places = found_op
    _, inverse, found = op.args
    last = next(iter(reversed(graph.nodes)))
    results: list[Any] = list(last.args[0])
    mode, classes = ir.fake_mode(graph), ir.alias_classes(graph)
    taken = [classes[n] for n in graph.nodes if n.op == "placeholder"]
    taken += [classes[n] for i, n in enumerate(results) if i not in places]
    own: list[fx.Node] = []
    for gradient in given:
        value = ir.tensor_of(gradient)
        assert value is not None
        shared = classes[gradient] in taken or any(stride == 0 for stride in value.stride())
        taken.append(classes[gradient])
        with graph.inserting_before(op) if gradient.op == "placeholder" else graph.inserting_after(gradient):
            if value.dtype in ir.LOW_DTYPES:
                gradient = ir.call(graph, mode, torch.ops.aten._to_copy.default, (gradient,), {"dtype": torch.float32})
            elif shared:
                contiguous = {"memory_format": torch.contiguous_format}
                gradient = ir.call(graph, mode, torch.ops.aten.clone.default, (gradient,), contiguous)
        own.append(gradient)
    with graph.inserting_before(op):
        found_now = ir.call(graph, mode, torch.ops.amp.unscale_.default, (own, inverse, found), {})
    for place, gradient in zip(places, own, strict=True):
        name = results[place].name
        results[place].replace_all_uses_with(gradient)
        graph.erase_node(results[place])
        if gradient.op != "placeholder":
            gradient._rename(name)
    next(user for user in op.users if user.args[1] == 1).replace_all_uses_with(found_now)
    graph.eliminate_dead_code()
    gm.recompile()
    return True


PASS = Pass(
    "unscale_in_place", Dialect.FUNCTIONAL, requires=(SCALED,), ensures=(IN_PLACE,), run=run, when=(RECOMPUTES_NOTHING,)
)
