"""scatter_gradients: average the gradients of sharded parameters over the processes, and give each process its rows.

1. ``unscale([g_1, …])``  →  ``unscale([rows of wait(reduce_scatter(g_1 / processes)), …])``. A low-precision gradient
   is widened to fp32 first, unless another dtype is asked for. Rows are padded to a multiple of the processes.
2. Small gradients share a collective: ``reduce_scatter(cat([g_1 as [processes, …], g_2 as [processes, …]], 1))``.
3. A bucket is sent right behind the last of its gradients, and waited for right before the next is sent: what is whole
   of a gradient does not outlive the next one.
4. The gradient of a parameter of no dimensions, which every process holds, is all-reduced.
5. ``found`` is that of the rows of this process, so its maximum over the processes takes its place.

Requires: functional, step; parameters that are divided among processes. Ensures: scattered. A second run changes
nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.errors import CaptureError
from amp_compiler.common.torch_names import collectives
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import SHARDS
from amp_compiler.rewrite.facts import FUNCTIONAL, SCATTERED, STEP
from amp_compiler.rewrite.sharding import Sharding

aten = torch.ops.aten

Call = Callable[..., fx.Node]


@dataclass(eq=False)
class Whole:
    """The gradient of one parameter, as this process's batch gives it."""

    place: int  # among the outputs
    name: str
    node: fx.Node
    value: torch.Tensor
    dtype: torch.dtype  # of the communication
    position: int

    @property
    def bytes(self) -> int:
        return int(self.value.numel()) * self.dtype.itemsize


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    sharding = ctx.sharding
    if sharding is None or ir.SCATTERS in gm.meta:
        return False
    graph, mode = gm.graph, ir.fake_mode(gm.graph)
    last = next(iter(reversed(graph.nodes)))
    results: list[Any] = list(last.args[0])
    unscale = next((n for n in graph.nodes if ir.op_name(n) == "amp::unscale"), None)
    buckets = _buckets(_whole_gradients(gm, results, unscale, sharding), sharding)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return ir.call(graph, mode, target, args, kwargs)

    own: dict[int, fx.Node] = {}
    sent: tuple[list[Whole], fx.Node] | None = None
    for number, bucket in enumerate(buckets):
        latest = max(bucket, key=lambda g: g.position).node
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first if latest.op == "placeholder" else latest.next):
            packed = _pack(bucket, sharding, call)
            if sent is not None:
                _receive(*sent, own, sharding, call)
            sent = bucket, _send(bucket, packed, sharding, call)
            for name, node in (("mean", packed), ("sent", sent[1])):
                node._rename(f"{name}_{number}")
    with graph.inserting_before(unscale or last):
        if sent is not None:
            _receive(*sent, own, sharding, call)
        _finish(gm, results, own, unscale, sharding, call)
    last.args = (tuple(results),)
    gm.meta[ir.SCATTERS] = tuple(tuple(g.name for g in bucket) for bucket in buckets)
    graph.eliminate_dead_code()
    gm.recompile()
    return True


def _whole_gradients(
    gm: fx.GraphModule, results: list[Any], unscale: fx.Node | None, sharding: Sharding
) -> list[Whole]:
    positions = {node: position for position, node in enumerate(gm.graph.nodes)}
    roles: tuple[ir.Role, ...] = gm.meta[ir.ROLE]
    places = [place for place, role in enumerate(roles) if role.kind == "gradient"]
    nodes: Any = [results[place] for place in places] if unscale is None else unscale.args[0]
    found = []
    for place, node in zip(places, nodes, strict=True):
        name, value = gm.meta[ir.SHARDED].get(roles[place].index, ""), ir.tensor_of(node)
        assert value is not None
        if not name:
            raise CaptureError("a tensor that needs a gradient is not a parameter of the model's modules")
        if value.layout is not torch.strided:
            raise CaptureError(f"the gradient of {name} is sparse: make the embedding with sparse=False")
        dtype = sharding.reduction.dtype_for(value.dtype)
        found.append(Whole(place, name, node, value, dtype, positions[node]))
    return sorted(found, key=lambda g: g.position)


def _buckets(gradients: list[Whole], sharding: Sharding) -> list[list[Whole]]:
    """In the order in which they are complete. A large gradient is alone; small ones of a dtype fill a bucket."""
    limit = sharding.reduction.bucket_bytes
    found: list[list[Whole]] = []
    filling: dict[torch.dtype, list[Whole]] = {}
    for gradient in gradients:
        alone = gradient.value.dim() == 0 or gradient.bytes > limit
        bucket = [] if alone else filling.get(gradient.dtype, [])
        if not bucket or sum(g.bytes for g in bucket) + gradient.bytes > limit:
            bucket = []
            found.append(bucket)
        bucket.append(gradient)
        if not alone:
            filling[gradient.dtype] = bucket
    return sorted(found, key=lambda bucket: bucket[-1].position)


def _pack(bucket: list[Whole], sharding: Sharding, call: Call) -> fx.Node:
    """The gradients of a bucket in one tensor whose i-th part along dimension 0 is for process i, divided."""
    size = sharding.reduction.size
    parts = []
    for gradient in bucket:
        node, value = gradient.node, gradient.value
        if value.dtype != gradient.dtype:
            node = call(aten._to_copy.default, node, dtype=gradient.dtype)
            node.meta[ir.OF_GRADIENT] = True
        if value.dim() and (missing := sharding.chunk(value.shape[0]) * size - value.shape[0]):
            node = call(aten.constant_pad_nd.default, node, [0] * (2 * value.dim() - 1) + [missing])
        elif not value.is_contiguous():
            node = call(aten.clone.default, node, memory_format=torch.contiguous_format)
        if len(bucket) > 1:
            node = call(aten.view.default, node, [size, node.meta["val"].numel() // size])
        parts.append(node)
    packed = parts[0] if len(parts) == 1 else call(aten.cat.default, parts, 1)
    return call(aten.div.Scalar, packed, size)


def _send(bucket: list[Whole], packed: fx.Node, sharding: Sharding, call: Call) -> fx.Node:
    reduction = sharding.reduction
    if bucket[0].value.dim() == 0:
        return call(collectives.all_reduce.default, packed, "sum", reduction.group)
    return call(collectives.reduce_scatter_tensor.default, packed, "sum", reduction.size, reduction.group)


def _receive(bucket: list[Whole], sent: fx.Node, own: dict[int, fx.Node], sharding: Sharding, call: Call) -> None:
    """The rows of this process: place among the outputs -> node, into ``own``."""
    reduced = call(collectives.wait_tensor.default, sent)
    reduced._rename(sent.name.replace("sent", "reduced"))
    if len(bucket) == 1:
        own[bucket[0].place] = _rows(bucket[0], reduced, sharding, call)
        return
    shapes = [(sharding.chunk(g.value.shape[0]), *g.value.shape[1:]) for g in bucket]
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    parts = call(aten.split_with_sizes.default, reduced, sizes, 1)
    for number, (gradient, shape) in enumerate(zip(bucket, shapes, strict=True)):
        part = call(aten.view.default, call(operator.getitem, parts, number), list(shape))
        own[gradient.place] = _rows(gradient, part, sharding, call)


def _rows(gradient: Whole, chunk: fx.Node, sharding: Sharding, call: Call) -> fx.Node:
    if gradient.value.dim() == 0:
        return chunk
    rows = sharding.own_rows(gradient.value.shape[0])
    return chunk if rows == chunk.meta["val"].shape[0] else call(aten.slice.Tensor, chunk, 0, 0, rows)


def _finish(
    gm: fx.GraphModule, results: list[Any], own: dict[int, fx.Node], unscale: fx.Node | None, sharding: Sharding,
    call: Call,
) -> None:  # fmt: skip
    """Unscale what this process has, and let all processes know of one that is not finite."""
    roles: tuple[ir.Role, ...] = gm.meta[ir.ROLE]
    primals = {n.meta[ir.ROLE].index: n for n in gm.graph.nodes
               if n.op == "placeholder" and n.meta[ir.ROLE].kind == "primal"}  # fmt: skip
    places = sorted(own)
    nodes = [own[place] for place in places]
    if unscale is not None:
        unscaled = call(torch.ops.amp.unscale.default, nodes, *unscale.args[1:])
        gradients = call(operator.getitem, unscaled, 0)
        nodes = [call(operator.getitem, gradients, number) for number in range(len(nodes))]
        mine = call(operator.getitem, unscaled, 1)
        sent = call(collectives.all_reduce.default, mine, "max", sharding.reduction.group)
        found = call(collectives.wait_tensor.default, sent)
        (old,) = (user for user in unscale.users if user.args[1] == 1)
        old.replace_all_uses_with(found)
        results[:] = [found if node is old else node for node in results]
    for place, node in zip(places, nodes, strict=True):
        primal = primals[roles[place].index]
        dtype = results[place].meta["val"].dtype
        if node.meta["val"].dtype != dtype:
            node = call(aten._to_copy.default, node, dtype=dtype)
        node._rename(f"grad_{primal.name}")
        results[place] = node


PASS = Pass(
    "scatter_gradients", Dialect.FUNCTIONAL, requires=(FUNCTIONAL, STEP), ensures=(SCATTERED,), run=run, when=(SHARDS,)
)
