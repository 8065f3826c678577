"""What a training step of many processes will hold and send, read off the graph that one of them would run.

The model is captured on fake tensors, and the passes put the same collectives into its graph as they would for a real
run; no process group is needed, because nothing runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .. import ir
from ..capture.autodiff import joint_graph
from ..capture.export import capture_export
from ..capture.fakes import fake_call
from ..common.errors import ArgumentError
from ..common.gradients import LOW
from ..common.torch_names import pytree
from ..cost.graph import peak_bytes
from ..cost.optimizers import find_optimizer
from ..passes import order
from ..policy import Policy, dtype_name
from ..rewrite.base import Context
from ..rewrite.facts.parallel import collective
from ..rewrite.reduction import Reduction
from ..rewrite.sharding import Sharding
from .sharded import BUCKET_BYTES

WAYS = ("data", "sharded")
_KINDS = {
    "all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter", "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
}  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind and dtype in a step: how many, and the bytes of the whole tensors that they move."""

    kind: str
    dtype: str
    count: int | None
    bytes: int


@dataclass(frozen=True)
class Column:
    """One way of training, per rank and step. None: not told by a graph of ours."""

    title: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    peak: int | None
    traffic: tuple[Traffic, ...]

    @property
    def bytes_sent(self) -> int:
        """The bytes of all collectives together."""
        return sum(t.bytes for t in self.traffic)


@dataclass(frozen=True)
class Plan:
    """What ``amp-compiler plan`` prints: our step beside the same in fp32 and beside FSDP2."""

    ranks: int
    parallel: str
    level: str
    dtype: str
    parameters: int  # of the whole model
    columns: tuple[Column, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON document; sizes in bytes."""
        return {
            "ranks": self.ranks, "parallel": self.parallel, "level": self.level, "dtype": self.dtype,
            "parameters": self.parameters, "notes": list(self.notes),
            "columns": [
                {
                    "title": c.title, "parameters": c.parameters, "gradients": c.gradients, "optimizer": c.optimizer,
                    "activations": c.activations, "peak": c.peak, "bytes_sent": c.bytes_sent,
                    "collectives": [vars(t) for t in c.traffic],
                }
                for c in self.columns
            ],
        }  # fmt: skip


def plan(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, *, policy: Policy, ranks: int,
    parallel: str = "sharded", optimizer: str = "adamw", reshard_after_forward: bool = True,
) -> Plan:  # fmt: skip
    """The memory and the communication of one training step on each of ``ranks`` processes.

    ``args`` and ``kwargs`` are the batch of one process. The loss is the model's first output that is a single number;
    without one, the sum of its outputs stands for it.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"The number of ranks must be a whole number of at least 1, not {ranks!r}.")
    if parallel not in WAYS:
        raise ArgumentError(f"Unknown way of training {parallel!r}: choose one of {', '.join(WAYS)}.")
    kept = find_optimizer(optimizer).kept
    if not any(p.requires_grad for p in model.parameters()):
        raise ArgumentError("The model has no parameter that requires a gradient: there is nothing to train.")
    fake, given, named = fake_call(model, args, kwargs)
    fake.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured = capture_export(fake, given, named, low=policy.low, policy=policy)
    whole = sum(p.numel() for p in model.parameters())
    reduction = Reduction("plan", ranks, bucket_bytes=25 << 20 if parallel == "data" else BUCKET_BYTES)
    sharding = Sharding(reduction, 0, reshard_after_forward) if parallel == "sharded" else None
    columns = []
    for title, level in ((f"{policy.level} {dtype_name(policy.low)}", policy), ("fp32", Policy("O0", policy.low))):
        gm = ir.copy_graph(captured.graph)
        ctx = Context(level, twin=captured.twin)
        order.build(order.OF_THIS_CPU).forward.run(gm, ctx, [], graph="forward")
        scales = level is policy and policy.low is torch.float16
        joint = _step(gm, level, reduction if sharding is None else None, sharding, scales)
        columns.append(_column(title, joint, kept))
    if sharding is not None:
        columns.append(_fsdp(model, policy.low, columns[0], reshard_after_forward))
    notes = [
        "bytes are those of the whole tensors that a collective gathers, scatters or averages; a ring sends "
        f"{'twice ' if sharding is None else ''}(ranks - 1) / ranks of them from each rank"
    ]
    values = (value for node in captured.graph.graph.nodes for value in ir.tensor_outputs(node) if value is not None)
    if any(not isinstance(size, int) for value in values for size in value.shape):
        notes.append("some sizes depend on the data: each counts as 1, so what follows from it is left out")
    return Plan(ranks, parallel, policy.level, dtype_name(policy.low), whole, tuple(columns), tuple(notes))


def _step(
    gm: fx.GraphModule, policy: Policy, reduction: Reduction | None, sharding: Sharding | None, scales: bool
) -> fx.GraphModule:
    """The joint graph of a training step, with its collectives."""
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    names = {i: n.meta[ir.PATH] for i, n in enumerate(places) if n.meta.get(ir.PATH) and _is_trained(n)}
    _add_loss(gm)
    joint = joint_graph(gm, [n.meta["val"] for n in places], set())
    joint.meta[ir.PARAMETER] = set(names)
    joint.meta[ir.NAMES] = joint.meta[ir.SHARDED] = names
    low = any(_is_trained(n) and n.meta["val"].dtype in LOW for n in places)
    ctx = Context(policy, scales_loss=scales, updates_in_fp32=low, reduction=reduction, sharding=sharding)
    order.build(order.OF_THIS_CPU).step.run(joint, ctx, [], graph="joint", after="autodiff")
    return joint


def _is_trained(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.requires_grad


def _add_loss(gm: fx.GraphModule) -> None:
    """Make the loss the graph's only output."""
    graph, mode = gm.graph, ir.fake_mode(gm.graph)
    last = next(iter(reversed(graph.nodes)))
    found = [
        n for n in pytree.tree_leaves(last.args[0])
        if isinstance(n, fx.Node) and (value := ir.tensor_of(n)) is not None and value.is_floating_point()
    ]  # fmt: skip
    if not found:
        raise ArgumentError("The model gives no floating-point output to train by.")
    loss = next((n for n in found if n.meta["val"].numel() == 1 and n.meta["val"].dim() == 0), None)
    with graph.inserting_before(last):
        if loss is None:
            sums = [ir.call(graph, mode, torch.ops.aten.sum.default, (n,), {"dtype": torch.float32}) for n in found]
            loss = sums[0]
            for other in sums[1:]:
                loss = ir.call(graph, mode, torch.ops.aten.add.Tensor, (loss, other), {})
    last.args = ((loss,),)
    gm.meta[ir.LOSS] = 0
    graph.eliminate_dead_code()
    gm.recompile()


# --------------------------------------------------------------------------------------------- reading


def _column(title: str, joint: fx.GraphModule, state: int) -> Column:
    results = pytree.tree_leaves(next(iter(reversed(joint.graph.nodes))).args[0])
    gradients = [n for role, n in zip(joint.meta[ir.ROLE], results, strict=True) if role.kind == "gradient"]
    held = [n for n in joint.graph.nodes if n.op == "placeholder" and n.meta[ir.ROLE].index in joint.meta[ir.PARAMETER]
            and n.meta[ir.ROLE].kind == "primal"]  # fmt: skip
    kept = sum(_numel(n) * (state + 4 * (n.meta["val"].dtype in LOW)) for n in held)  # with fp32 masters
    return Column(
        title, sum(_bytes(n) for n in held), sum(_bytes(n) for n in gradients), kept, _activations(joint),
        peak_bytes(joint) + kept, traffic(joint),
    )  # fmt: skip


def _numel(node: fx.Node) -> int:
    return sum(ir.concrete(v.numel()) for v in ir.tensor_outputs(node) if v is not None)


def _bytes(node: fx.Node) -> int:
    return sum(ir.nbytes(v) for v in ir.tensor_outputs(node) if v is not None)


def _activations(joint: fx.GraphModule) -> int:
    """The bytes that the forward makes and the backward reads, each piece of memory once, gathered parameters left
    out."""
    classes = ir.alias_classes(joint.graph)
    inputs = {classes[n] for n in joint.graph.nodes if n.op == "placeholder"}
    gathered = {classes[n] for n in joint.graph.nodes if collective(n) in ("all_gather_into_tensor", "wait_tensor")}
    found: dict[Any, int] = {}
    for node in joint.graph.nodes:
        if node.op != "call_function" or ir.in_backward(node) or classes[node] in inputs | gathered:
            continue
        if any(ir.in_backward(user) for user in node.users):
            found[classes[node]] = max(found.get(classes[node], 0), _bytes(node))
    return sum(found.values())


def traffic(joint: fx.GraphModule) -> tuple[Traffic, ...]:
    counts: dict[tuple[str, str], list[int]] = {}
    for node in joint.graph.nodes:
        kind = _KINDS.get(collective(node))
        if kind is None:
            continue
        source = node.all_input_nodes[0]
        whole = max(_bytes(node), _bytes(source))  # a gather's result, a scatter's input
        value = ir.tensor_of(node)
        assert value is not None
        counts.setdefault((kind, dtype_name(value.dtype)), []).append(whole)
    return tuple(Traffic(kind, dtype, len(sizes), sum(sizes)) for (kind, dtype), sizes in sorted(counts.items()))


def _fsdp(model: nn.Module, low: torch.dtype, ours: Column, reshard: bool) -> Column:
    """FSDP2 with ``MixedPrecisionPolicy(param_dtype=low, reduce_dtype=float32)``: one dtype for every parameter."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    traffic = (
        Traffic("all-gather", dtype_name(low), None, trained * low.itemsize * (2 if reshard else 1)),
        Traffic("reduce-scatter", "float32", None, trained * 4),
    )
    title = f"FSDP2, param_dtype={dtype_name(low)}"
    return Column(title, ours.parameters, ours.gradients, ours.optimizer, None, None, traffic)
