"""gather_parameters: gather each sharded parameter right before it is used, in low precision where every reader is low.

1. ``use(w)``  →  ``use(wait(all_gather(w_rows)))``: the input becomes the rows that this process holds.
2. A parameter that is only read low is cast before the gather, ``all_gather(cast(w_rows))``: the same bits and half the
   traffic. One that some op reads in fp32 is gathered once, in fp32, and cast afterwards.
3. The backward gathers again what it reads, unless parameters are to stay (``reshard_after_forward=False``): views and
   casts of a parameter that the forward made are made again there, so that nothing keeps the first copy in memory.
4. Small parameters that are used one after the other share a gather: ``all_gather(cat([w_1_rows, w_2_rows]))``.
5. Each gather starts before the first op that uses the gather ahead of it, and is waited for right before its own first
   use, so that communication overlaps computation and at most two gathers' parameters are whole at a time.

Rows are padded to those of the largest shard. A parameter of no dimensions is whole in every process. With activation
checkpointing the gathers of the forward are marked to be computed again, and torch's partitioner repeats them in the
backward. Views and casts stand in any order in front of a use: rounding commutes with a view.

Requires: functional, step; parameters that are divided among processes. Ensures: gathered. A second run changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from amp_compiler import ir
from amp_compiler.common.errors import CaptureError
from amp_compiler.common.torch_names import collectives
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import SHARDS
from amp_compiler.rewrite.facts import FUNCTIONAL, GATHERED, STEP
from amp_compiler.rewrite.facts.sharded import first_of_backward, remade
from amp_compiler.rewrite.sharding import Gather, Sharding

aten = torch.ops.aten

Call = Callable[..., fx.Node]


@dataclass(eq=False)
class Wanted:
    """A parameter that is used in one phase, the forward or the backward."""

    name: str
    rows: fx.Node  # the input: what this process has
    shape: torch.Size  # of the whole
    dtype: torch.dtype  # in which it is gathered
    phase: str
    #: (node, what it reads: the input, or a view or cast of it)
    uses: list[tuple[fx.Node, fx.Node]]
    first: int  # position of the first use

    @property
    def key(self) -> tuple[torch.dtype, torch.dtype]:
        return self.rows.meta["val"].dtype, self.dtype

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    sharding = ctx.sharding
    if sharding is None or ir.GATHERS in gm.meta:
        return False
    graph, mode = gm.graph, ir.fake_mode(gm.graph)
    positions = {node: position for position, node in enumerate(graph.nodes)}
    nodes = list(graph.nodes)
    boundary = positions[first_of_backward(graph)]
    inputs = _divided_inputs(gm)
    again = ctx.recomputes and sharding.reshard_after_forward
    marks: dict[str, dict[str, Any]] = {
        "forward": {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 1 << 30} if again else {},
        "backward": {"partitioner_tag": "is_backward"},
    }
    wanted = [w for node in inputs for w in _wanted(gm, node, positions, boundary, sharding, again)]
    gathers: list[Gather] = []
    casts: dict[fx.Node, fx.Node] | None = {} if ctx.accumulates else None

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = ir.call(graph, mode, target, args, kwargs)
        node.meta.update(marks[phase])
        return node

    with mode:
        shards = {node: sharding.own(node.meta["val"]) for node in inputs}
    for node, shard in shards.items():
        node.meta["val"] = shard
    for phase, start in (("forward", _after_inputs(nodes)), ("backward", boundary)):
        buckets = _buckets([w for w in wanted if w.phase == phase], sharding)
        for number, bucket in enumerate(buckets):
            begin = buckets[number - 1][0].first if number else start
            with graph.inserting_before(nodes[begin]):
                sent = _send(bucket, sharding, call, casts)
            sent._rename(f"gather_{len(gathers)}")
            with graph.inserting_before(nodes[bucket[0].first]):
                _receive(bucket, sent, sharding, call)
            size = sum(w.bytes for w in bucket)
            gathers.append(Gather(phase, tuple(w.name for w in bucket), bucket[0].dtype, size))
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
        if n.op == "placeholder" and n.meta[ir.ROLE].kind == "primal" and n.meta[ir.ROLE].index in names
        and n.meta["val"].dim() > 0
    ]  # fmt: skip


def _wanted(
    gm: fx.GraphModule, node: fx.Node, positions: dict[fx.Node, int], boundary: int, sharding: Sharding, again: bool
) -> list[Wanted]:
    """What to gather of one input: nothing, or once for each phase that uses it. ``again``: the partitioner will repeat
    the forward's gathers in the backward."""
    name = gm.meta[ir.SHARDED][node.meta[ir.ROLE].index]
    phases = ("forward", "backward") if sharding.reshard_after_forward and not again else ("forward",)
    found: list[Wanted] = []
    for phase in phases:
        uses = [
            (user, source) for user, source in _uses(node, positions)
            if len(phases) == 1 or (positions[user] >= boundary) == (phase == "backward")
        ]  # fmt: skip
        if not uses:
            continue
        shape, dtype = node.meta["val"].shape, _dtype_of(node, uses)
        found.append(Wanted(name, node, shape, dtype, phase, uses, positions[uses[0][0]]))
    return found


def _uses(node: fx.Node, positions: dict[fx.Node, int]) -> list[tuple[fx.Node, fx.Node]]:
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


def _dtype_of(node: fx.Node, uses: list[tuple[fx.Node, fx.Node]]) -> torch.dtype:
    """The low dtype that all of these uses round the parameter to before they read it; else the parameter's own."""
    own: torch.dtype = node.meta["val"].dtype
    dtypes = set()
    for _, source in uses:
        behind = (n.meta["val"].dtype for n in _chain(source, node) if isinstance(n.meta["val"], torch.Tensor))
        dtypes.add(next((dtype for dtype in behind if dtype != own), own))
    (dtype, *others) = dtypes
    return dtype if not others and dtype in ir.LOW_DTYPES else own


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


def _send(bucket: list[Wanted], sharding: Sharding, call: Call, casts: dict[fx.Node, fx.Node] | None) -> fx.Node:
    """Start a gather. ``casts``: casts of whole shards, which the second phase shares with the first; None if a shard
    is cast anew, so that its low copy need not live until the backward."""
    source, dtype = bucket[0].key
    parts: list[fx.Node] = []
    for parameter in bucket:
        node, rows = parameter.rows, parameter.rows.meta["val"]
        if len(bucket) == 1 and source != dtype and casts is not None:
            if node not in casts:
                casts[node] = call(aten._to_copy.default, node, dtype=dtype)
            node = casts[node]
        if missing := sharding.chunk(parameter.shape[0]) - rows.shape[0]:
            node = call(aten.constant_pad_nd.default, node, [0] * (2 * rows.dim() - 1) + [missing])
        if rows.dim() > 1:
            node = call(aten.view.default, node, [node.meta["val"].numel()])
        parts.append(node)
    packed = parts[0] if len(parts) == 1 else call(aten.cat.default, parts)
    if packed.meta["val"].dtype != dtype:
        packed = call(aten._to_copy.default, packed, dtype=dtype)
    reduction = sharding.reduction
    return call(collectives.all_gather_into_tensor.default, packed, reduction.size, reduction.group)


def _receive(bucket: list[Wanted], sent: fx.Node, sharding: Sharding, call: Call) -> None:
    gathered = call(collectives.wait_tensor.default, sent)
    gathered._rename(sent.name.replace("gather", "gathered"))
    size = sharding.reduction.size
    if len(bucket) > 1:
        gathered = call(aten.view.default, gathered, [size, gathered.meta["val"].numel() // size])
    offset = 0
    for parameter in bucket:
        shape, node = parameter.shape, gathered
        chunk = sharding.chunk(shape[0])
        if len(bucket) > 1:
            length = chunk * shape[1:].numel()
            node = call(aten.slice.Tensor, gathered, 1, offset, offset + length)
            node = call(aten.clone.default, node, memory_format=torch.contiguous_format)
            offset += length
        if list(node.meta["val"].shape) != [chunk * size, *shape[1:]]:
            node = call(aten.view.default, node, [chunk * size, *shape[1:]])
        if chunk * size > shape[0]:
            node = call(aten.slice.Tensor, node, 0, 0, shape[0])
        ir.inherit_origin(node, parameter.rows)
        if node is not gathered:
            node._rename(f"whole_{parameter.rows.name}")
        _hand_over(parameter, node, call)


def _hand_over(parameter: Wanted, whole: fx.Node, call: Call) -> None:
    """Let the uses of a phase read the gathered parameter; views and casts of it are made anew before the first."""
    made: dict[Any, fx.Node] = {parameter.rows: whole}
    for user, source in parameter.uses:
        for node in _chain(source, parameter.rows):
            if node in made:
                continue
            given = made[node.args[0]]
            if ir.is_float_cast(node) and ir.cast_dtype(node) == given.meta["val"].dtype:
                made[node] = given
                continue
            with whole.graph.inserting_before(user):
                made[node] = call(node.target, given, *node.args[1:], **node.kwargs)
            ir.inherit_origin(made[node], node)
        user.replace_input_with(source, made[source])


PASS = Pass(
    "gather_parameters", Dialect.FUNCTIONAL, requires=(FUNCTIONAL, STEP), ensures=(GATHERED,), run=run, when=(SHARDS,)
)
