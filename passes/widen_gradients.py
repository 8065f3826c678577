"""widen_gradients: return the gradient of a low-precision parameter in fp32, for an update that is made in fp32.

1. ``return g: bf16`` as the gradient of a bf16 parameter  →  ``return cast(g, f32)``
2. ``return add(a, b)``, the gradients of two uses of a parameter  →  ``return add(cast(a, f32), cast(b, f32))``
3. ``return embedding_dense_backward(g, …)``, a sum over all uses of a row  →  the same of ``cast(g, f32)``

From here on, the graph is that of an fp32 model: gradients are unscaled, summed and reduced in fp32, a product gives
its fp32 sum (``fuse_cast_matmul``), and nothing is rounded back to the parameter's dtype.

Requires: functional, step; low-precision parameters that are updated in fp32. Ensures: widened. A second run changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import UPDATES_IN_FP32
from amp_compiler.rewrite.facts import FUNCTIONAL, STEP, WIDENED

aten = torch.ops.aten
Call = Callable[..., fx.Node]


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    graph, mode = gm.graph, ir.fake_mode(gm.graph)
    last = next(iter(reversed(graph.nodes)))
    results: list[Any] = list(last.args[0])
    places = [place for place, role in enumerate(gm.meta[ir.ROLE]) if role.kind == "gradient"]
    low = [place for place in places if _is_low(results[place])]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return ir.call(graph, mode, target, args, kwargs)

    for place in low:
        results[place] = _widened(graph, results[place], call)
        results[place].meta[ir.OF_GRADIENT] = True
    if low:
        last.args = (tuple(results),)
        graph.eliminate_dead_code()
        gm.recompile()
    return bool(low)


def _widened(graph: fx.Graph, node: fx.Node, call: Call) -> fx.Node:
    """Return the gradient in fp32, from where it is first rounded if nothing else reads it."""
    if len(node.users) == 1 and node.target is aten.add.Tensor and not node.kwargs and all(map(_is_low, node.args)):
        parts = [_widened(graph, part, call) for part in node.args]  # type: ignore[arg-type]
        with graph.inserting_after(node):
            return _like(node, call(aten.add.Tensor, *parts))
    if len(node.users) == 1 and node.target is aten.embedding_dense_backward.default:
        with graph.inserting_after(node):
            return _like(node, call(node.target, _cast(graph, node.args[0], call), *node.args[1:]))
    return _cast(graph, node, call)


def _cast(graph: fx.Graph, node: Any, call: Call) -> fx.Node:
    last = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(last) if node.op == "placeholder" else graph.inserting_after(node):
        return call(aten._to_copy.default, node, dtype=torch.float32)


def _like(node: fx.Node, new: fx.Node) -> fx.Node:
    new.meta = {**node.meta, "val": new.meta["val"]}
    return new


def _is_low(node: Any) -> bool:
    value = ir.tensor_of(node) if isinstance(node, fx.Node) else None
    return value is not None and value.dtype in ir.LOW_DTYPES


PASS = Pass(
    "widen_gradients", Dialect.FUNCTIONAL, requires=(FUNCTIONAL, STEP), ensures=(WIDENED,), run=run,
    when=(UPDATES_IN_FP32,),
)  # fmt: skip
