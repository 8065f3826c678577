"""flatten_products: on a CPU, multiply all rows of a layer's input by its weight at once, and add the bias there.

1. ``bmm(x, expand(w))``  →  ``view(mm(view(clone(x)), w))``: torch's `linear` of an input whose rows do not follow each
   other in memory is a batch of products with the same matrix. oneDNN copies that matrix once per product, which takes
   many times as long as the products; a copy of the rows takes no time beside them.
2. ``add(view(mm(x, w)), b)``  →  ``view(addmm(b, x, w))``, where both are from the same `linear`: an input with another
   layout gets the numbers that a contiguous one gets, rounded once, and one op less reads and writes the result.

For products of low operands only. Off with ``Policy.torch``, whose results are bit-identical to autocast's.

Requires: folded. Ensures: folded. A second run changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import FOLDED

aten = torch.ops.aten
_SHAPES = (aten.view.default, aten._unsafe_view.default)


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    if ctx.policy.autocast_device is not None:
        return False
    graph, modified = gm.graph, False
    for node in list(graph.nodes):
        if node.target is aten.bmm.default and _is_low_on_cpu(node) and not node.kwargs:
            modified |= _flatten(graph, node)
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and _is_low_on_cpu(node):
            modified |= _add_in_product(graph, node)
    if modified:
        graph.eliminate_dead_code()
        gm.recompile()
    return modified


def _is_low_on_cpu(node: fx.Node) -> bool:
    value = ir.tensor_of(node)
    return value is not None and value.dtype in ir.LOW_DTYPES and value.device.type == "cpu"


def _flatten(graph: fx.Graph, node: fx.Node) -> bool:
    """Apply rule 1; False if the node has another form."""
    left, right = node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    matrix, rows, result = _expanded(right), ir.tensor_of(left), ir.tensor_of(node)
    if matrix is None or rows is None or result is None:
        return False
    if not all(isinstance(size, int) for size in (rows.shape[-1], result.shape[-1])):
        return False
    if any(isinstance(size, int) and size == 0 for size in (*rows.shape, *result.shape)):
        return False
    mode = ir.fake_mode(graph)

    def call(target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        new = ir.call(graph, mode, target, args, kwargs)
        ir.inherit_origin(new, node)
        ir.inherit_placement(new, node)
        return new

    with graph.inserting_before(node):
        if not _follow_each_other(rows):
            left = call(aten.clone.default, (left,), memory_format=torch.contiguous_format)
        flat = call(aten.view.default, (left, [-1, rows.shape[-1]]))
        product = call(aten.mm.default, (flat, matrix))
        sizes = [n if isinstance(n, int) else call(aten.sym_size.int, (left, d)) for d, n in enumerate(rows.shape[:2])]
        shown = call(aten.view.default, (product, [*sizes, result.shape[-1]]))
    node.replace_all_uses_with(shown)
    graph.erase_node(node)
    return True


def _expanded(node: fx.Node) -> fx.Node | None:
    """Return the matrix that a batch of matrices consists of; None if they may differ."""
    while node.target in (*_SHAPES, aten.expand.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        one, other = ir.tensor_of(source), ir.tensor_of(node)
        if one is None or other is None or one.dim() < 2 or one.shape[-2:] != other.shape[-2:]:
            return None
        if one.dim() == 2:
            return source
        node = source
    return None


def _follow_each_other(rows: torch.Tensor) -> bool:
    """True if a view can show all rows of a batch as one matrix, for any sizes."""
    (_, m, k), (batch, row, value) = rows.shape, rows.stride()
    known = all(isinstance(n, int) for n in (m, k, batch, row, value))
    return known and value == 1 and batch == m * row


def _add_in_product(graph: fx.Graph, node: fx.Node) -> bool:
    """Apply rule 2; False if the node has another form."""
    shown, bias = (*node.args, None)[:2]
    if not isinstance(shown, fx.Node) or not isinstance(bias, fx.Node) or node.kwargs:
        return False
    product = shown
    while product.target in _SHAPES and len(product.users) == 1:
        product = product.all_input_nodes[0]
    if product.target is not aten.mm.default or not _is_low_on_cpu(product) or len(product.users) != 1:
        return False
    if not ir.traced_from(node) or ir.traced_from(node) != ir.traced_from(product):
        return False
    plus, sums, added = ir.tensor_of(bias), ir.tensor_of(product), ir.tensor_of(node)
    if plus is None or sums is None or added is None or plus.dim() != 1:
        return False
    if not (plus.dtype is sums.dtype is added.dtype):
        return False
    columns = plus.shape[0]
    if not isinstance(columns, int) or not columns == sums.shape[-1] == added.shape[-1]:
        return False
    with graph.inserting_before(node):
        new = graph.call_function(aten.addmm.default, (bias, *product.args))
        new.meta = dict(product.meta)
        view = new
        if shown is not product:
            view = graph.call_function(shown.target, (new, *shown.args[1:]))  # type: ignore[arg-type]
            view.meta = dict(shown.meta)
    node.replace_all_uses_with(view)
    return True


PASS = Pass("flatten_products", Dialect.FUNCTIONAL, requires=(FOLDED,), ensures=(FOLDED,), run=run)
