"""Facts about a graph in functional ATen, and those that either dialect can have."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ... import ir
from ...common.torch_names import OpOverload
from ...kernels.cpu import product_runs_wide
from ...kernels.lowering import BY_OP
from ..base import Context, Dialect, Fact, Place
from .forward import only_aten

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}  # op -> position of the left operand
COMPOSITE = {aten.linear.default, aten.matmul.default, aten.layer_norm.default, aten.batch_norm.default,
             aten.conv1d.default, aten.conv2d.default, aten.softmax.int}  # fmt: skip
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.expand.default}
#: ``batch_casts`` batches vectors of at most ``LARGEST`` elements, if there are at least ``FEWEST`` casts of them; with
#: fewer, cat and split cost more than they save
LARGEST, FEWEST = 1 << 14, 3


def _functional(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """Only ATen calls, and the only writes are those that copy new values into inputs at the end."""
    only_aten(gm, ctx, place)
    for node in gm.graph.nodes:
        for name, arg in ir.tensor_args(node):
            if name in ir.mutated_args(node) and arg.op == "call_function" and ir.op_name(node) != "copy_":
                place.fail("writes in place in a graph that should be functional.", node)


def _past_autograd(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """A conversion's graph is never differentiated; in any other that still will be, casts require gradients."""
    for node in gm.graph.nodes if ctx.weights is None else ():
        if node.target is aten.to.dtype:
            place.fail("is a cast that autograd has not seen yet: moving it could change a gradient.", node)


def _decomposed(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """No common op is left that AOTAutograd always decomposes."""
    for node in gm.graph.nodes if ctx.weights is None else ():
        if node.target in COMPOSITE:
            place.fail("is a composite of other ops, which autograd would have recorded.", node)


def _folded(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    seen: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    frozen = ir.written_nodes(gm.graph)
    pinned = ir.output_nodes(gm.graph)
    for node in gm.graph.nodes:
        if not ir.is_cast(node):
            continue
        source = ir.cast_source(node)
        if source in frozen or node in frozen or node in pinned:
            continue
        twin = seen.setdefault((source, ir.cast_dtype(node)), node)
        if twin is not node:
            place.fail(f"repeats the cast '{twin.name}'.", node)
        if ir.is_cast(source) and source not in frozen:
            origin = ir.tensor_of(ir.cast_source(source))
            movable = ir.cast_source(source) not in frozen
            if movable and origin is not None and ir.lossless(origin.dtype, ir.cast_dtype(source)):
                place.fail(f"casts '{source.name}', which is itself a lossless cast.", node)


def _viewed(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """No transposition undoes another, unless it is an output, which must not be replaced by an input."""
    returned = ir.output_nodes(gm.graph)
    for node in gm.graph.nodes:
        inner = node.args[0] if node.target is torch.ops.aten.t.default else None
        if isinstance(inner, fx.Node) and inner.target is node.target and not (
            "recompute" in node.meta or node in returned
        ):
            place.fail(f"transposes {inner.name} back.", node)


def _no_idle_view(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """No view has the shape and memory layout of its source, unless it is an output made from an input."""
    returned, classes = ir.output_nodes(gm.graph), ir.alias_classes(gm.graph)
    written = {classes[n] for n in ir.written_nodes(gm.graph)}
    for node in gm.graph.nodes:
        if node.target not in VIEWS or "recompute" in node.meta or classes[node] in written:
            continue
        seen, shown = ir.tensor_of(node.args[0]), ir.tensor_of(node)
        if seen is None or shown is None or (node in returned and node.args[0].op == "placeholder"):
            continue
        one, other = ((*v.shape, *v.stride(), v.dtype) for v in (seen, shown))
        if not any(isinstance(n, torch.SymInt) for n in (*one, *other)) and one == other:
            place.fail(f"shows {node.args[0].name} unchanged.", node)


def _fused(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """No product is left that ``amp::cast_matmul`` should compute, as far as the product itself shows."""
    for node in gm.graph.nodes if ctx.policy.autocast_device is None else ():
        value = ir.tensor_of(node) if node.target in PRODUCTS and not node.kwargs else None
        if value is None or value.dtype not in ir.LOW_DTYPES or not takes_bias(node):
            continue
        if value.device.type == "cpu" and product_runs_wide(value.dtype, product_sizes(node)):
            place.fail("is a low-precision product that this CPU computes in fp32.", node)
        if value.device.type == "cuda" and ctx.backend == "eager" and ir.LEFT not in node.meta:
            left = PRODUCTS[node.target]
            for operand in node.args[left : left + 2]:
                if ir.is_float_cast(operand) and len(operand.users) == 1 and _of_input(operand):
                    place.fail(f"reads '{operand.name}', a rounding that it could do itself.", node)


def product_sizes(node: fx.Node) -> tuple[Any, Any, Any, Any]:
    """Return the sizes of a product (batch, rows, summed, columns), some of which may be symbolic."""
    left = ir.tensor_of(node.args[PRODUCTS[node.target]])  # type: ignore[index,arg-type]
    result = ir.tensor_of(node)
    assert left is not None
    assert result is not None
    batch = result.shape[0] if result.dim() == 3 else 1
    return batch, result.shape[-2], left.shape[-1], result.shape[-1]


def takes_bias(node: fx.Node) -> bool:
    """True if nothing is added to the product, or one number per column."""
    bias = node.args[0] if node.target is aten.addmm.default else None
    value = ir.tensor_of(bias) if isinstance(bias, fx.Node) else None
    return node.target is not aten.addmm.default or (value is not None and value.dim() == 1)


def _of_input(cast: fx.Node) -> bool:
    value = ir.tensor_of(ir.cast_source(cast))
    return ir.cast_source(cast).op == "placeholder" and value is not None and value.dtype is torch.float32


def wanted_kernel(node: fx.Node) -> tuple[Any, str]:
    """Return the kernel that should run for a node and why, from the table of kernels; its own op and "" if none."""
    row = BY_OP.get(node.target) if isinstance(node.target, OpOverload) else None
    why = row.why([v for _, a in ir.tensor_args(node) if (v := ir.tensor_of(a)) is not None]) if row is not None else ""
    return (row.kernel, why) if row is not None and why else (node.target, "")


def unread_results(node: fx.Node) -> tuple[int, ...]:
    """Return the numbers of the results that a kernel computes for a backward, if nothing reads any of them."""
    row = BY_OP.get(node.target) if isinstance(node.target, OpOverload) else None
    if row is None or not row.saved or node.kwargs.get("keeps") is False:
        return ()
    known = all(user.target is operator.getitem for user in node.users)
    return row.saved if known and not any(user.args[1] in row.saved and user.users for user in node.users) else ()


def _lowered(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """No op is left for which the table has a kernel that should run here, and none computes what nothing reads."""
    for node in gm.graph.nodes if ctx.policy.autocast_device is None else ():
        kernel, why = wanted_kernel(node)
        if kernel is not node.target:
            place.fail(f"should be replaced by one of our kernels, {why}.", node)
        if unread_results(node):
            place.fail("computes results for a backward that nothing reads.", node)


def alike_casts(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return groups of ``FEWEST`` or more casts of short one-dimensional inputs that one cast could replace."""
    frozen = ir.written_nodes(graph) | ir.output_nodes(graph)
    groups: dict[tuple[torch.dtype, torch.dtype, torch.device], list[fx.Node]] = {}
    for node in graph.nodes:
        checkpointed = "recompute" in node.meta or "ac_graph_id" in node.meta  # the partitioner decides where it runs
        if not ir.is_float_cast(node) or checkpointed or {node, ir.cast_source(node)} & frozen:
            continue
        value = _short_input(ir.cast_source(node))
        if value is not None:
            groups.setdefault((value.dtype, ir.cast_dtype(node), value.device), []).append(node)
    return [casts for casts in groups.values() if len(casts) >= FEWEST]


def _short_input(node: fx.Node) -> torch.Tensor | None:
    value = ir.tensor_of(node)
    if node.op != "placeholder" or value is None or value.dim() != 1 or str(node.target).startswith("tangents"):
        return None
    size = value.shape[0]
    return value if isinstance(size, int) and 0 < size <= LARGEST and value.is_contiguous() else None


def _batched(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """No casts of short vectors are left that one cast could replace."""
    for casts in alike_casts(gm.graph):
        place.fail(f"is one of {len(casts)} casts that one cast could replace.", casts[0])


FUNCTIONAL = Fact(
    "functional", Dialect.FUNCTIONAL,
    "Only ATen calls, and the only writes are those that copy new values into inputs at the end.", check=_functional,
)  # fmt: skip
PAST_AUTOGRAD = Fact(
    "past_autograd", None,
    "The graph will not be differentiated again: gradients are nodes of it, or it is for inference only.",
    check=_past_autograd, deep=_decomposed,
)  # fmt: skip
FOLDED = Fact(
    "folded", None, "No cast repeats another, none follows a lossless one.", check=_folded, made_by="fold_casts"
)
VIEWED = Fact(
    "viewed", Dialect.FUNCTIONAL, "No transposition undoes another, and no view shows its source unchanged.",
    check=_viewed, deep=_no_idle_view, made_by="fold_views",
)  # fmt: skip
FUSED = Fact(
    "fused", Dialect.FUNCTIONAL,
    "No product of low operands is left on a CPU that computes it in fp32; with the eager backend, no product on a GPU "
    "is the only reader of a rounded input.",
    check=_fused, made_by="fuse_cast_matmul", inside=False,
)  # fmt: skip
LOWERED = Fact(
    "lowered", Dialect.FUNCTIONAL,
    "No op is left for which `kernels/lowering.py` has a kernel that should run here.",
    check=_lowered, made_by="lower_kernels", inside=False,
)  # fmt: skip
BATCHED = Fact(
    "batched", Dialect.FUNCTIONAL, f"Fewer than {FEWEST} casts of short one-dimensional inputs are alike.",
    check=_batched, made_by="batch_casts", inside=False,
)  # fmt: skip
