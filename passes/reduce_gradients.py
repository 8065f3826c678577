"""reduce_gradients: average the gradients of a step over the processes that train together, in buckets.

1. ``unscale([g_1, g_2, …])``  →  ``bucket = wait(all_reduce(cat([g_1, g_2]) / processes))``; ``unscale([bucket, …])``;
   ``gradient_i`` is its part of the unscaled bucket. A low-precision gradient is widened to fp32 first, unless
   another dtype is asked for.
2. Each bucket is packed and sent right behind the last of its gradients, and all waits come before the unscaling, so
   that communication overlaps the rest of the backward.
3. In the graph that ends an update of several micro-batches: ``g_i`` becomes ``g_i + sum_i * scale``, where ``sum_i``
   holds the unscaled gradients of the earlier micro-batches; so a sum is reduced once per update.
4. Without a loss scale the parts of the reduced buckets are the gradients themselves.

The check for inf and NaN comes after the reduction: if one process has them in a gradient, all have them in the reduced
one, so all skip together, without another collective.

Requires: functional, step; gradients that several processes share. Ensures: reduced. A second run changes nothing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.errors import CaptureError
from amp_compiler.common.torch_names import collectives
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import REDUCES
from amp_compiler.rewrite.facts import FUNCTIONAL, REDUCED, STEP
from amp_compiler.rewrite.reduction import Layout, Reduction

aten = torch.ops.aten


@dataclass
class Gradient:
    """One gradient on its way out of the graph."""

    place: int  # among the outputs
    index: int  # of its parameter among the forward's inputs
    name: str
    node: fx.Node  # as it is computed; scaled, if there is a loss scale
    primal: fx.Node
    dtype: torch.dtype  # in which it leaves the graph
    position: int = 0

    @property
    def value(self) -> torch.Tensor:
        value = ir.tensor_of(self.node)
        assert value is not None
        return value


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    reduction = ctx.reduction
    if ir.BUCKETS in gm.meta or reduction is None:
        return False
    graph, mode = gm.graph, ir.fake_mode(gm.graph)
    last = next(iter(reversed(graph.nodes)))
    results: list[Any] = list(last.args[0])
    unscale = next((n for n in graph.nodes if ir.op_name(n) == "amp::unscale"), None)
    gradients = _gradients(gm, results, unscale)
    _refuse_sparse(gradients)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return ir.call(graph, mode, target, args, kwargs)

    if reduction.of_sums:
        _add_sums(gm, gradients, call)
    positions = {node: position for position, node in enumerate(graph.nodes)}
    for gradient in gradients:
        gradient.position = positions[gradient.node]
    gradients.sort(key=lambda g: g.position)
    by_name = {gradient.name: gradient for gradient in gradients}
    known = (found for found in reduction.layouts if sorted(sum(found, ())) == sorted(by_name))
    layout = next(known, None) or _choose(gradients, reduction)
    buckets = [[by_name[name] for name in names] for names in layout]

    sent: list[fx.Node] = []
    for number, bucket in enumerate(buckets):
        latest = max(bucket, key=lambda g: g.position).node
        behind = latest if latest.op != "placeholder" else _first(graph).prev
        with graph.inserting_before(behind.next):
            packed = _pack(bucket, reduction, call)
            mean = call(aten.div.Scalar, packed, reduction.size)
            sent.append(call(collectives.all_reduce.default, mean, "sum", reduction.group))
            for node, name in ((packed, "bucket"), (mean, "mean"), (sent[-1], "sent")):
                node._rename(f"{name}_{number}")
    with graph.inserting_before(unscale or last):
        reduced = [call(collectives.wait_tensor.default, node) for node in sent]
        for number, node in enumerate(reduced):
            node._rename(f"reduced_{number}")
        if unscale is not None:
            unscaled = call(torch.ops.amp.unscale.default, reduced, *unscale.args[1:])
            found = call(operator.getitem, unscaled, 1)
            parts = call(operator.getitem, unscaled, 0)
            reduced = [call(operator.getitem, parts, number) for number in range(len(reduced))]
            next(user for user in unscale.users if user.args[1] == 1).replace_all_uses_with(found)
        for node, bucket in zip(reduced, buckets, strict=True):
            _unpack(node, bucket, results, call)
    results = [found if role.kind == "found" else node for role, node in zip(gm.meta[ir.ROLE], results, strict=True)]
    last.args = (tuple(results),)
    if reduction.of_sums:
        gm.meta[ir.ROLE] = tuple(ir.Role("total", r.index) if r.kind == "gradient" else r for r in gm.meta[ir.ROLE])
    gm.meta[ir.BUCKETS] = layout
    graph.eliminate_dead_code()
    gm.recompile()
    return True


def _gradients(gm: fx.GraphModule, results: list[Any], unscale: fx.Node | None) -> list[Gradient]:
    roles: tuple[ir.Role, ...] = gm.meta[ir.ROLE]
    names: dict[int, str] = gm.meta[ir.NAMES]
    primals = {n.meta[ir.ROLE].index: n for n in gm.graph.nodes
               if n.op == "placeholder" and n.meta[ir.ROLE].kind == "primal"}  # fmt: skip
    places = [place for place, role in enumerate(roles) if role.kind == "gradient"]
    nodes = [results[place] for place in places] if unscale is None else list(unscale.args[0])  # type: ignore[arg-type]
    return [
        Gradient(place, roles[place].index, names[roles[place].index], node, primals[roles[place].index],
                 results[place].meta["val"].dtype)
        for place, node in zip(places, nodes, strict=True)
    ]


def _refuse_sparse(gradients: list[Gradient]) -> None:
    for gradient in gradients:
        if gradient.value.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {gradient.name} is sparse, and a bucket of gradients is dense: make the embedding "
                "with sparse=False"
            )


def _add_sums(gm: fx.GraphModule, gradients: list[Gradient], call: Any) -> None:
    graph = gm.graph
    scale = next((n for n in graph.nodes if n.op == "placeholder" and n.meta[ir.ROLE].kind == "scale"), None)
    for gradient in gradients:
        role = ir.Role("sum", gradient.index)
        held = ir.retype(gradient.primal.meta["val"], gradient.dtype)
        total = ir.add_input(graph, f"sum_{gradient.primal.name}", role, held)
        before = _first(graph) if gradient.node.op == "placeholder" else gradient.node.next
        with graph.inserting_before(before):
            node, dtype = gradient.node, torch.promote_types(gradient.value.dtype, torch.float32)
            if gradient.value.dtype != dtype:
                node = _cast(node, dtype, call)
            if total.meta["val"].dtype != dtype:
                total = call(aten._to_copy.default, total, dtype=dtype)
            if scale is None:
                gradient.node = call(aten.add.Tensor, node, total)
            else:
                gradient.node = call(aten.addcmul.default, node, total, scale)


def _cast(gradient: fx.Node, dtype: torch.dtype, call: Any) -> fx.Node:
    cast: fx.Node = call(aten._to_copy.default, gradient, dtype=dtype)
    cast.meta[ir.OF_GRADIENT] = True
    return cast


def _first(graph: fx.Graph) -> fx.Node:
    first: fx.Node = next(n for n in graph.nodes if n.op != "placeholder")
    return first


def _choose(gradients: list[Gradient], reduction: Reduction) -> Layout:
    """Choose buckets: gradients in the order in which they are computed, each bucket of one dtype and at most the given
    size."""
    buckets: list[list[str]] = []
    held, dtype = 0, None
    for gradient in gradients:
        own = reduction.dtype_for(gradient.value.dtype)
        size = gradient.value.numel() * own.itemsize
        if dtype != own or held + size > reduction.bucket_bytes:
            buckets.append([])
            held, dtype = 0, own
        buckets[-1].append(gradient.name)
        held += size
    return tuple(tuple(names) for names in buckets)


def _pack(bucket: list[Gradient], reduction: Reduction, call: Any) -> fx.Node:
    parts: list[fx.Node] = []
    for gradient in bucket:
        node, value = gradient.node, gradient.value
        dtype = reduction.dtype_for(value.dtype)
        if value.dtype != dtype:
            node = _cast(node, dtype, call)
        if not value.is_contiguous():
            node = call(aten.clone.default, node, memory_format=torch.contiguous_format)
        parts.append(call(aten.view.default, node, [value.numel()]))
    packed: fx.Node = parts[0] if len(parts) == 1 else call(aten.cat.default, parts)
    return packed


def _unpack(reduced: fx.Node, bucket: list[Gradient], results: list[Any], call: Any) -> None:
    sizes = [gradient.value.numel() for gradient in bucket]
    parts = call(aten.split_with_sizes.default, reduced, sizes)
    for number, gradient in enumerate(bucket):
        value = gradient.primal.meta["val"]
        part = call(aten.view.default, call(operator.getitem, parts, number), list(value.shape))
        if part.meta["val"].dtype != gradient.dtype:
            part = call(aten._to_copy.default, part, dtype=gradient.dtype)
        part._rename(f"grad_{gradient.primal.name}")
        results[gradient.place] = part


PASS = Pass(
    "reduce_gradients", Dialect.FUNCTIONAL, requires=(FUNCTIONAL, STEP), ensures=(REDUCED,), run=run, when=(REDUCES,)
)
