"""fold_casts: remove provably redundant casts from the graph that will run.

1. ``cast(cast(x: bf16, f32), bf16)``  →  ``x``: the first cast loses nothing, so it may be skipped
   (``bool → f32 → bf16`` becomes ``bool → bf16``); ``f32 → bf16 → f32`` rounds, and stays
2. two equal casts of one value  →  one
3. ``cast(view(cast(x: bf16, f32)), bf16)``  →  ``view(x)``: a lossless cast sinks below an op that only moves
   or selects values (class EXACT), where that moves fewer bytes
4. ``cast(expand(x: f32), bf16)``  →  ``expand(cast(x, bf16))``: a rounding rises above such an op, where that
   moves fewer bytes and nothing else reads the fp32 result

Every rule keeps every output and every gradient bit-identical. The pass runs after autodiff: before it, sharing one
cast would make gradients add up in low precision, and a cast moved across ``relu`` could change one.
Rules 3 and 4 are greedy: each step reduces the bytes that casts write, one sweep carries a cast through a whole
chain, and sweeps are repeated until nothing changes. They don't apply where sizes are symbolic.
Memory that the graph writes to keeps its copies, and each output that the caller gets stays a tensor of its own.

Requires: past_autograd (a graph from AOTAutograd, or a conversion's). Ensures: folded. A second run changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.torch_names import OpOverload, schema_of
from amp_compiler.policy.ops.names import find_row
from amp_compiler.policy.ops.row import OpClass
from amp_compiler.rewrite.base import Context, Pass
from amp_compiler.rewrite.facts import FOLDED, PAST_AUTOGRAD

aten = torch.ops.aten


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    modified = False
    for _, inner in ir.all_graphs(gm):
        if _fold(inner.graph):
            inner.recompile()
            modified = True
    return modified


def _fold(graph: fx.Graph) -> bool:
    modified = False
    if not any(ir.is_cast(n) for n in graph.nodes):
        return False
    keep = _Keep(ir.written_nodes(graph), ir.output_nodes(graph))
    changed = True
    while changed:  # rules 3 and 4 write fewer bytes each time, so this ends
        changed = _chains_and_copies(graph, keep)
        changed |= _move(graph, keep)
        modified |= changed
    return modified


@dataclass(frozen=True)
class _Keep:
    """``written``: memory that the graph writes to, so a copy of it must stay a copy. ``outputs``: tensors that the
    caller gets and may write to, so two of them must not become one, and none of them may become an input."""

    written: set[fx.Node]
    outputs: set[fx.Node]


# ----------------------------------------------------------------------------------------- rules 1 and 2


def _chains_and_copies(graph: fx.Graph, keep: _Keep) -> bool:
    modified = False
    seen: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if not ir.is_cast(node) or node in keep.written:
            continue
        source = ir.cast_source(node)
        while ir.is_cast(source) and _skippable(source, keep):
            source = ir.cast_source(source)
        if source in keep.written or ir.tensor_of(source) is None:
            continue
        if source is not ir.cast_source(node):
            node.replace_input_with(ir.cast_source(node), source)
            modified = True
        dtype = ir.cast_dtype(node)
        value, result = ir.tensor_of(source), ir.tensor_of(node)
        assert value is not None
        if node in keep.outputs:
            continue
        if result is not None and value.dtype == dtype and _same_strides(value, result):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            modified = True
            continue
        first = seen.setdefault((source, dtype), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            modified = True
    return _drop_unused(graph) or modified


def _skippable(node: fx.Node, keep: _Keep) -> bool:
    """True for a lossless cast of memory that is never written to: its readers may read its source instead."""
    value = ir.tensor_of(ir.cast_source(node))
    untouched = node not in keep.written and ir.cast_source(node) not in keep.written
    return untouched and value is not None and ir.lossless(value.dtype, ir.cast_dtype(node))


def _drop_unused(graph: fx.Graph) -> bool:
    modified = False
    for node in reversed(list(graph.nodes)):
        if not node.users and (ir.is_cast(node) or _is_exact(node)):
            graph.erase_node(node)
            modified = True
    return modified


# ----------------------------------------------------------------------------------------- rules 3 and 4


def _move(graph: fx.Graph, keep: _Keep) -> bool:
    modified = False
    movable = [n for n in graph.nodes if n not in keep.written and _is_exact(n) and not ir.has_integer_operand(n)]
    for node in movable:
        modified |= bool(node.users) and _sink(graph, node, keep)
    for node in reversed(movable):
        modified |= bool(node.users) and _rise(graph, node, keep)
    return modified


def _is_exact(node: fx.Node) -> bool:
    if node.op != "call_function" or ir.is_cast(node) or not isinstance(node.target, OpOverload):
        return False
    if schema_of(node.target).is_mutable or node.target.namespace != "aten":
        return False
    row = find_row(ir.op_name(node))
    return (
        row is not None and row.cls is OpClass.EXACT and ir.tensor_of(node) is not None
        and dict(ir.schema_args(node)).get("dtype") is None
    )  # fmt: skip


def _float_args(node: fx.Node) -> list[fx.Node]:
    found = []
    for _, arg in ir.tensor_args(node):
        value = ir.tensor_of(arg)
        if value is not None and value.dtype.is_floating_point and arg not in found:
            found.append(arg)
    return found


def _sink(graph: fx.Graph, node: fx.Node, keep: _Keep) -> bool:
    """Apply rule 3: if ``node`` reads only lossless casts of low values, let it read the low values themselves."""
    args, result = _float_args(node), ir.tensor_of(node)
    assert result is not None
    if not args or result.dtype is not torch.float32 or not _static(result):
        return False
    low: torch.dtype | None = None
    for arg in args:
        if not ir.is_float_cast(arg) or not _skippable(arg, keep):
            return False
        before, after = ir.tensor_of(ir.cast_source(arg)), ir.tensor_of(arg)
        assert before is not None
        assert after is not None
        if low not in (None, before.dtype) or not _static(after) or not _same_strides(before, after):
            return False
        low = before.dtype
    assert low is not None
    if low not in ir.LOW_DTYPES or not _scalars_fit(node, low):
        return False
    narrow = [u for u in node.users if ir.is_cast(u) and ir.cast_dtype(u) == low and _replaceable(u, result, keep)]
    others = [u for u in node.users if u not in narrow]
    saved = sum(ir.nbytes(result, low) for _ in narrow)
    for arg in args:
        value = ir.tensor_of(arg)
        assert value is not None
        if set(arg.users) <= {node}:
            saved += ir.nbytes(value)
    if not narrow or saved <= (ir.nbytes(result) if others else 0):
        return False
    for arg in args:
        node.replace_input_with(arg, ir.cast_source(arg))
    node.meta["val"] = ir.retype(result, low)
    if others:
        wide = _new_cast(graph, node, torch.float32)
        for user in others:
            user.replace_input_with(node, wide)
    for user in narrow:
        user.replace_all_uses_with(node)
        graph.erase_node(user)
    return True


def _rise(graph: fx.Graph, node: fx.Node, keep: _Keep) -> bool:
    """Apply rule 4: if only roundings to one dtype read ``node``, round its inputs instead of its result."""
    args, result = _float_args(node), ir.tensor_of(node)
    assert result is not None
    if not args or result.dtype is not torch.float32 or not _static(result) or any(a in keep.written for a in args):
        return False
    users = list(node.users)
    if not all(ir.is_float_cast(u) and _replaceable(u, result, keep) for u in users):
        return False
    dtypes = {ir.cast_dtype(u) for u in users}
    if len(dtypes) != 1:
        return False
    (low,) = dtypes
    if low not in ir.LOW_DTYPES or not _scalars_fit(node, low):
        return False
    present: dict[fx.Node, fx.Node] = {}
    cost = 0
    for arg in args:
        value = ir.tensor_of(arg)
        assert value is not None
        if value.dtype is not torch.float32 or not _static(value) or not value.is_contiguous():
            return False
        ready = next((u for u in arg.users if ir.is_cast(u) and ir.cast_dtype(u) == low), None)
        if ready is not None:
            present[arg] = ready
        else:
            cost += ir.nbytes(value, low)
    if cost >= ir.nbytes(result, low):
        return False
    for arg in args:
        rounded = present.get(arg)
        if rounded is None:
            with graph.inserting_before(node):
                rounded = graph.call_function(aten._to_copy.default, (arg,), {"dtype": low})
            value = ir.tensor_of(arg)
            assert value is not None
            rounded.meta["val"] = ir.retype(value, low)
            ir.inherit_origin(rounded, node)
        elif rounded > node:
            node.prepend(rounded)  # its source comes before node, so it may too
            ir.inherit_placement(rounded, node)
        node.replace_input_with(arg, rounded)
    node.meta["val"] = ir.retype(result, low)
    for user in users:
        user.replace_all_uses_with(node)
        graph.erase_node(user)
    return True


def _replaceable(cast: fx.Node, moved: torch.Tensor, keep: _Keep) -> bool:
    """True for a cast whose readers may read a value with the strides of ``moved`` instead: no output, not written."""
    value = ir.tensor_of(cast)
    return cast not in keep.outputs and cast not in keep.written and value is not None and _same_strides(value, moved)


def _new_cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    value = ir.tensor_of(node)
    assert value is not None
    with graph.inserting_after(node):
        new = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    new.meta["val"] = ir.retype(value, dtype)
    ir.inherit_origin(new, node)
    return new


def _scalars_fit(node: fx.Node, low: torch.dtype) -> bool:
    for _, value in ir.schema_args(node):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
        if is_number and float(torch.tensor(float(value), dtype=torch.float64).to(low)) != value:
            return False
    return True


def _static(value: torch.Tensor) -> bool:
    return all(isinstance(s, int) for s in value.shape)


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    sizes, left, right = a.shape, a.stride(), b.stride()
    if not all(isinstance(s, int) for s in (*sizes, *left, *right)):
        return False
    return all(n <= 1 or x == y for n, x, y in zip(sizes, left, right, strict=True))


PASS = Pass("fold_casts", None, requires=(PAST_AUTOGRAD,), ensures=(FOLDED,), run=run)
