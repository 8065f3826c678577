"""hoist_weight_casts: cast weights to low precision once per update, not once per micro-batch.

``w_low = cast(w)``  →  ``w_low`` is an input of the graph; a second graph, run once per update, computes it from ``w``

Only where micro-batches are accumulated: there a weight keeps its value from one to the next. With one batch per update
there is nothing to gain, and the low copy would live longer than the step.

Requires: folded, step; several micro-batches per update. Ensures: hoisted. A second run changes nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import ACCUMULATES
from amp_compiler.rewrite.facts import FOLDED, HOISTED, STEP


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    graph = gm.graph
    frozen = ir.written_nodes(graph) | ir.output_nodes(graph)
    parameters: set[int] = gm.meta[ir.PARAMETER]
    casts = [
        n for n in graph.nodes
        if ir.is_float_cast(n) and n not in frozen and ir.cast_source(n).op == "placeholder"
        and ir.cast_source(n).meta[ir.ROLE].kind == "primal" and ir.cast_source(n).meta[ir.ROLE].index in parameters
    ]  # fmt: skip
    if not casts:
        return False
    makers = fx.Graph()
    made: list[fx.Node] = []
    for cast in casts:
        source = ir.cast_source(cast)
        with graph.inserting_before(source):  # torch's partitioners recognize inputs of the forward by name
            low = graph.placeholder(f"primals_low_{source.name}_{len(made)}")
        low._rename(f"low_{source.name}")
        low.meta.update({**cast.meta, ir.ROLE: ir.Role("low", source.meta[ir.ROLE].index)})
        place = makers.placeholder(f"{source.name}_{len(made)}")
        place.meta.update(source.meta)
        place._rename(source.name)
        made.append(makers.call_function(torch.ops.aten._to_copy.default, (place,), {"dtype": ir.cast_dtype(cast)}))
        made[-1].meta.update(cast.meta)
        cast.replace_all_uses_with(low)
        graph.erase_node(cast)
    makers.output(tuple(made))
    gm.meta[ir.WEIGHTS] = fx.GraphModule(torch.nn.Module(), makers)
    gm.recompile()
    return True


PASS = Pass(
    "hoist_weight_casts", Dialect.FUNCTIONAL, requires=(FOLDED, STEP), ensures=(HOISTED,), run=run, when=(ACCUMULATES,)
)
