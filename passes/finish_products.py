"""finish_products: in inference on a CPU, a product does what follows it while its results are in the cache.

1. ``add(view(cast_matmul(x, w)), y)``  →  ``view(cast_matmul(x, w, plus=y))``, if y has the sum's shape, strides
   and dtype, and nothing else reads the product; likewise ``mul`` (``times=y``) and ``relu`` (``relu=True``)
2. a chain of them, in the order sum, product, relu, becomes one op: ``relu(add(cast_matmul(x, w), y))``  →
   ``cast_matmul(x, w, plus=y, relu=True)``

Every step is rounded as before, so no bit changes; a pass over memory is saved, and on a CPU without low-precision
units torch's elementwise ops take longer in low precision than in fp32. Training is left alone: there the partitioner
decides what is kept for the backward, op by op.

Requires: folded, fused. Ensures: folded, fused. A second run changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import EAGER
from amp_compiler.rewrite.facts import FOLDED, FUSED

aten = torch.ops.aten
#: ops that a product can do, each with its argument; they run in this order, whatever is there
_STEPS = {aten.add.Tensor: "plus", aten.mul.Tensor: "times", aten.relu.default: "relu"}
_ORDER = tuple(_STEPS.values())
_SHAPES = (aten.view.default, aten._unsafe_view.default)


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    if ctx.policy.autocast_device is not None:
        return False
    modified = False
    for node in list(gm.graph.nodes):
        if node.target not in _STEPS or node.kwargs:
            continue
        found = [pair for pair in _products_of(node) if _can_do(*pair, node)]
        if found:
            _finish(gm.graph, *found[-1], node)
            modified = True
    if modified:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return modified


def _products_of(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return the products that only the node reads, possibly through views, each with the operand."""
    found = []
    for operand in dict.fromkeys(arg for arg in node.args if isinstance(arg, fx.Node)):
        product = operand
        while product.target in _SHAPES and len(product.users) == 1:
            product = product.all_input_nodes[0]
        if ir.op_name(product) == "amp::cast_matmul" and len(product.users) == 1 == len(operand.users):
            found.append((product, operand))
    return found


def _can_do(product: fx.Node, operand: fx.Node, node: fx.Node) -> bool:
    step, low = _STEPS[node.target], product.args[3]  # type: ignore[index]
    result, shown = ir.tensor_of(node), ir.tensor_of(operand)
    if result is None or shown is None or product.args[4] is not low or product.meta["val"].device.type != "cpu":
        return False
    if any(done in product.kwargs for done in _ORDER[_ORDER.index(step) :]):
        return False
    if step == "relu":
        return True
    other = _other(node, operand)
    value = ir.tensor_of(other) if isinstance(other, fx.Node) else None
    if value is None or other is operand or value.device.type != "cpu":
        return False
    return value.dtype is result.dtype is low and all(
        ir.same_sizes(x.shape, shown.shape) and ir.same_sizes(x.stride(), shown.stride()) for x in (value, result)
    )


def _other(node: fx.Node, operand: fx.Node) -> Any:
    """Return the other of the two operands; None if there are more or fewer."""
    if len(node.args) != 2:
        return None
    return node.args[1] if node.args[0] is operand else node.args[0]


def _finish(graph: fx.Graph, product: fx.Node, operand: fx.Node, node: fx.Node) -> None:
    """Let the product do what the node does. It moves there, because what it reads then may be made after it."""
    step = _STEPS[node.target]  # type: ignore[index]
    given = True if step == "relu" else _other(node, operand)
    views: list[fx.Node] = []
    while operand is not product:
        views.append(operand)
        operand = operand.all_input_nodes[0]
    with graph.inserting_before(node):
        new = graph.call_function(product.target, product.args, {**product.kwargs, step: given})  # type: ignore[arg-type]
        new.meta = dict(product.meta)
        new.meta[ir.KERNEL] = f"{product.meta[ir.KERNEL]}; does the {ir.op_name(node)} that follows it"
        for view in reversed(views):
            shown = graph.call_function(view.target, (new, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
            shown.meta = dict(view.meta)
            new = shown
    node.replace_all_uses_with(new)
    for old in (node, *views, product):
        graph.erase_node(old)


PASS = Pass(
    "finish_products", Dialect.FUNCTIONAL, requires=(FOLDED, FUSED), ensures=(FOLDED, FUSED), when=(EAGER,), run=run
)
