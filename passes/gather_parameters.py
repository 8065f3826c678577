"""gather_parameters: a process has some rows of each parameter, and gathers the rest right before it is used.

1. ``use(w)``  →  ``use(wait(all_gather(w_rows)))``: the input becomes the rows that this process holds.
2. A parameter that is only read low is cast before the gather, ``all_gather(cast(w_rows))``: the same bits and half the
   traffic. One that some op reads in fp32 is gathered once, in fp32, and cast afterwards.
3. The backward gathers again what it reads, unless parameters are to stay (``reshard_after_forward=False``): views and
   casts of a parameter that the forward made are made again there, so that nothing keeps the first copy in memory.
4. Small parameters that are used one after the other share a gather: ``all_gather(cat([w_1_rows, w_2_rows]))``.
5. Each gather starts before the first op that uses the gather ahead of it, and is waited for right before its own first
   use, so that communication overlaps computation and at most two gathers' parameters are whole at a time.

Rows are padded to those of the largest shard. A parameter of no dimensions is whole in every process.

Requires: folded, viewed, step; parameters that are divided among processes. Ensures: gathered. A second run changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.errors import CaptureError
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import SHARDS
from amp_compiler.rewrite.facts import FOLDED, GATHERED, STEP, VIEWED
from amp_compiler.rewrite.facts.sharded import first_of_backward, remade
from amp_compiler.rewrite.sharding import Gather, Sharding

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Call = Callable[..., fx.Node]


@dataclass(eq=False)
class Wanted:
    """A parameter that is used in one phase, the forward or the backward."""

    name: str
    rows: fx.Node  # the input: what this process has
    whole: fx.Node  # what is replaced: the input, or its one cast
    value: torch.Tensor  # of ``whole``
    phase: str
    #: (node, what it reads that is ``whole`` or made of it)
    uses: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    first: int = 0  # position of the first use

    @property
    def key(self) -> tuple[torch.dtype, torch.dtype]:
        return self.rows.meta["val"].dtype, self.value.dtype

    @property
    def bytes(self) -> int:
        return int(self.value.numel()) * self.value.dtype.itemsize


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    sharding = ctx.sharding
    if sharding is None or ir.GATHERS in gm.meta:
        return False
    graph, mode = gm.graph, ir.fake_mode(gm.graph)
    positions = {node: position for position, node in enumerate(graph.nodes)}
    nodes = list(graph.nodes)
    boundary = positions[first_of_backward(graph)]
    inputs = _divided_inputs(gm)
    wanted = [w for node in inputs for w in _wanted(gm, node, positions, boundary, sharding)]
    gathers: list[Gather] = []

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return ir.call(graph, mode, target, args, kwargs)

    with mode:
        shards = {node: sharding.own(node.meta["val"]) for node in inputs}
    for node, shard in shards.items():
        node.meta["val"] = shard
    for phase, start in (("forward", _after_inputs(nodes)), ("backward", boundary)):
        buckets = _buckets([w for w in wanted if w.phase == phase], sharding)
        for number, bucket in enumerate(buckets):
            begin = buckets[number - 1][0].first if number else start
            with graph.inserting_before(nodes[begin]):
                sent = _send(bucket, sharding, call)
            with graph.inserting_before(nodes[bucket[0].first]):
                _receive(bucket, sent, sharding, call)
            size = sum(w.bytes for w in bucket)
            gathers.append(Gather(phase, tuple(w.name for w in bucket), bucket[0].value.dtype, size))
    _shrink_makers(gm, sharding)
    gm.meta[ir.GATHERS] = tuple(gathers)
    graph.eliminate_dead_code()
    gm.recompile()
    return True


def _divided_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    names: dict[int, str] = gm.meta[ir.SHARDED]
    for role in gm.meta[ir.ROLE]:
        if role.kind == "mutation" and role.index in names:
            raise CaptureError(f"the forward writes to the parameter {names[role.index]}, which is divided")
    return [
        n for n in gm.graph.nodes
        if n.op == "placeholder" and n.meta[ir.ROLE].kind in ("primal", "low") and n.meta[ir.ROLE].index in names
        and n.meta["val"].dim() > 0
    ]  # fmt: skip


def _wanted(
    gm: fx.GraphModule, node: fx.Node, positions: dict[fx.Node, int], boundary: int, sharding: Sharding
) -> list[Wanted]:
    """What to gather of one input: nothing, or once for each phase that uses it."""
    name = gm.meta[ir.SHARDED][node.meta[ir.ROLE].index]
    phases = ("forward", "backward") if sharding.reshard_after_forward else ("forward",)
    found: list[Wanted] = []
    for phase in phases:
        uses = [
            (user, source) for user, source in _uses(node, positions, boundary)
            if len(phases) == 1 or (positions[user] >= boundary) == (phase == "backward")
        ]  # fmt: skip
        if not uses:
            continue
        whole = _one_cast(node, uses)
        first = min(positions[user] for user, _ in uses)
        found.append(Wanted(name, node, whole, whole.meta["val"], phase, uses, first))
    return found


def _uses(node: fx.Node, positions: dict[fx.Node, int], boundary: int) -> list[tuple[fx.Node, fx.Node]]:
    """(op, what it reads) of every op that reads the parameter, through views and casts that can be made again."""
    found: list[tuple[fx.Node, fx.Node]] = []
    waiting = [node]
    while waiting:
        source = waiting.pop()
        for user in source.users:
            if remade(user):
                waiting.append(user)
            else:
                found.append((user, source))
    return sorted(found, key=lambda use: positions[use[0]])


def _one_cast(node: fx.Node, uses: list[tuple[fx.Node, fx.Node]]) -> fx.Node:
    """The cast through which all of these uses read the parameter, if it is one and to a low dtype; else the input."""
    casts = set()
    for _, source in uses:
        chain = _chain(source, node)
        casts.add(chain[0] if chain and ir.is_float_cast(chain[0]) else node)
    (cast, *others) = casts
    low = cast is not node and not others and ir.cast_dtype(cast) in ir.LOW_DTYPES
    return cast if low else node


def _chain(source: fx.Node, start: fx.Node) -> list[fx.Node]:
    """The views and casts from behind ``start`` to ``source``."""
    chain: list[fx.Node] = []
    while source is not start:
        chain.insert(0, source)
        source = source.args[0]  # type: ignore[assignment]
    return chain


def _after_inputs(nodes: list[fx.Node]) -> int:
    return next(position for position, node in enumerate(nodes) if node.op != "placeholder")


def _buckets(wanted: list[Wanted], sharding: Sharding) -> list[list[Wanted]]:
    """In the order of their first uses. A large parameter is alone; small ones of a dtype fill a bucket."""
    limit = sharding.reduction.bucket_bytes
    found: list[list[Wanted]] = []
    filling: dict[Any, list[Wanted]] = {}
    for parameter in sorted(wanted, key=lambda w: w.first):
        bucket = filling.get(parameter.key)
        alone = parameter.bytes > limit
        if alone or bucket is None or sum(w.bytes for w in bucket) + parameter.bytes > limit:
            bucket = []
            found.append(bucket)
            if not alone:
                filling[parameter.key] = bucket
        bucket.append(parameter)
    return found


def _send(bucket: list[Wanted], sharding: Sharding, call: Call) -> fx.Node:
    parts: list[fx.Node] = []
    for parameter in bucket:
        node, rows = parameter.rows, parameter.rows.meta["val"]
        if missing := sharding.chunk(parameter.value.shape[0]) - rows.shape[0]:
            node = call(aten.constant_pad_nd.default, node, [0] * (2 * rows.dim() - 1) + [missing])
        if len(bucket) > 1 and rows.dim() > 1:
            node = call(aten.view.default, node, [node.meta["val"].numel()])
        parts.append(node)
    packed = parts[0] if len(parts) == 1 else call(aten.cat.default, parts)
    source, dtype = bucket[0].key
    if source != dtype:
        packed = call(aten._to_copy.default, packed, dtype=dtype)
    reduction = sharding.reduction
    return call(c10d.all_gather_into_tensor.default, packed, reduction.size, reduction.group)


def _receive(bucket: list[Wanted], sent: fx.Node, sharding: Sharding, call: Call) -> None:
    gathered = call(c10d.wait_tensor.default, sent)
    size = sharding.reduction.size
    if len(bucket) > 1:
        gathered = call(aten.view.default, gathered, [size, gathered.meta["val"].numel() // size])
    offset = 0
    for parameter in bucket:
        shape = parameter.value.shape
        chunk, node = sharding.chunk(shape[0]), gathered
        if len(bucket) > 1:
            length = chunk * int(torch.Size(shape[1:]).numel())
            node = call(aten.slice.Tensor, gathered, 1, offset, offset + length)
            node = call(aten.clone.default, node, memory_format=torch.contiguous_format)
            node = call(aten.view.default, node, [chunk * size, *shape[1:]])
            offset += length
        if chunk * size > shape[0]:
            node = call(aten.slice.Tensor, node, 0, 0, shape[0])
        ir.inherit_origin(node, parameter.whole)
        _hand_over(parameter, node, call)


def _hand_over(parameter: Wanted, whole: fx.Node, call: Call) -> None:
    """Let the uses of a phase read the gathered parameter; views and casts of it are made anew before the first."""
    made: dict[fx.Node, fx.Node] = {parameter.whole: whole}
    for user, source in parameter.uses:
        for node in _chain(source, parameter.whole):
            if node not in made:
                with whole.graph.inserting_before(user):
                    made[node] = call(node.target, made[node.args[0]], *node.args[1:], **node.kwargs)  # type: ignore[index]
                ir.inherit_origin(made[node], node)
        user.replace_input_with(source, made[source])


def _shrink_makers(gm: fx.GraphModule, sharding: Sharding) -> None:
    """The graph that makes low copies of weights once per update makes those of this process's rows."""
    makers = gm.meta.get(ir.WEIGHTS)
    for node in makers.graph.nodes if makers is not None else ():
        if node.op == "placeholder" and node.meta[ir.ROLE].index in gm.meta[ir.SHARDED]:
            (cast,) = node.users
            with ir.fake_mode(gm.graph):
                node.meta["val"] = sharding.own(node.meta["val"])
                cast.meta["val"] = sharding.own(cast.meta["val"])


PASS = Pass(
    "gather_parameters", Dialect.FUNCTIONAL, requires=(FOLDED, VIEWED, STEP), ensures=(GATHERED,), run=run,
    when=(SHARDS,),
)  # fmt: skip
