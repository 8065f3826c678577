"""What a whole graph costs: device and host in parallel, where the time goes, and the most memory it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from .. import ir
from ..common.torch_names import pytree
from .model import CostModel
from .products import products
from .traffic import is_free, is_pointwise, nbytes

#: what the time of a step is spent on
COMPUTE, MEMORY, CASTS, LAUNCH, UPDATE, LINK = "compute", "memory", "casts", "launch", "optimizer", "communication"
#: what the host needs to issue a cast, or an op of the backward, as a share of another op: no module, no Python
WITHOUT_PYTHON = 0.5


class Speed(NamedTuple):
    """Factors on what the model assumes: how fast matrix units, ordinary units and memory are, and the host at issuing
    ops, and casts among them."""

    matrix: float = 1.0
    ordinary: float = 1.0
    memory: float = 1.0
    host: float = 1.0
    casts: float = 1.0


AS_ASSUMED = Speed()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A node that runs. ``kind``: casts, or "" for all else. ``host``: seconds to issue it."""

    node: str
    op: str
    module: str
    kind: str
    unit: str
    backward: bool
    flops: int
    nbytes: int
    compute: float
    memory: float
    launch: float
    host: float

    def busy(self, speed: Speed = AS_ASSUMED) -> tuple[str, float]:
        """(what it waits for, seconds without the launch)."""
        compute = self.compute / (speed.ordinary if self.unit == "fp32" else speed.matrix)
        memory = self.memory / speed.memory
        kind = self.kind or (COMPUTE if compute > memory else MEMORY)
        return kind, max(compute, memory)

    @property
    def seconds(self) -> float:
        return self.busy()[1] + self.launch


@dataclass(frozen=True)
class GraphCost:
    """The kernels of a graph in order, and the most bytes that it has in memory at a time.

    ``unknown``: nodes with a size that depends on data, which counts as 1.
    """

    kernels: tuple[Kernel, ...] = field(repr=False)
    peak_bytes: int = 0
    unknown: tuple[str, ...] = ()

    def busy(self, speed: Speed = AS_ASSUMED) -> dict[str, float]:
        """Seconds of the device by what they are spent on, launches included."""
        found = dict.fromkeys((COMPUTE, MEMORY, CASTS, LAUNCH), 0.0)
        for kernel in self.kernels:
            kind, seconds = kernel.busy(speed)
            found[kind] += seconds
            found[LAUNCH] += kernel.launch
        return found

    def host(self, speed: Speed = AS_ASSUMED) -> float:
        """Seconds that the host needs to issue all ops."""
        total = sum(k.host / (speed.casts if k.kind == CASTS else 1.0) for k in self.kernels)
        return total / speed.host

    @property
    def backward(self) -> float:
        """Seconds of the backward on the device."""
        return sum(kernel.seconds for kernel in self.kernels if kernel.backward)


def graph_cost(gm: fx.GraphModule, model: CostModel) -> GraphCost:
    """What a graph costs, the graphs inside its nodes included."""
    kernels: list[Kernel] = []
    unknown: list[str] = []
    for node in _nodes(gm):
        if any(_depends_on_data(v) for v in ir.tensor_outputs(node)):
            unknown.append(node.name)
        if is_free(node):
            continue
        parts = model.parts(node)
        backward, cast = ir.in_backward(node), ir.is_float_cast(node)
        issued = parts.launch > 0.0 or not model.fused  # a fused op is issued with the last of its chain
        kernels.append(Kernel(
            node.name, ir.op_name(node), ir.module_path(node) or "", CASTS if cast else "",
            parts.unit, backward, sum(p.flops for p in products(node)), parts.nbytes, parts.compute, parts.memory,
            parts.launch, model.device.host * (WITHOUT_PYTHON if backward or cast else 1.0) * issued,
        ))  # fmt: skip
    return GraphCost(tuple(kernels), peak_bytes(gm, model.fused), tuple(unknown))


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes that run. Of the branches of a condition the longest counts."""
    for node in gm.graph.nodes:
        if not ir.is_higher_order(node):
            yield node
            continue
        bodies = [list(_nodes(inner)) for _, inner in ir.subgraphs(gm, node)]
        if bodies and "cond" in ir.op_name(node):
            bodies = [max(bodies, key=len)]
        for body in bodies:
            yield from body


def _depends_on_data(value: object) -> bool:
    shape = getattr(value, "shape", ())
    return any(not isinstance(s, int) and getattr(s.node, "hint", None) is None for s in shape)


def peak_bytes(gm: fx.GraphModule, fused: bool = False) -> int:
    """The largest sum of bytes that are in memory at a time, inputs included, if each value goes after its last use."""
    classes = ir.alias_classes(gm.graph)
    nodes = list(gm.graph.nodes)
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for argument in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(argument, fx.Node):
                last[classes[argument]] = place
    last.update({classes[node]: len(nodes) for node in nodes if node.op == "placeholder"})
    held: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    now = peak = 0
    for place, node in enumerate(nodes):
        number = classes[node]
        inside = fused and node.users and is_pointwise(node) and all(is_pointwise(user) for user in node.users)
        if number not in held and not inside and node.op != "output":
            held[number] = sum(nbytes(v, None) for v in ir.tensor_outputs(node) if v is not None)
            now += held[number]
            ends.setdefault(last.get(number, place), []).append(number)
        peak = max(peak, now)
        now -= sum(held[gone] for gone in ends.pop(place, ()))
    return peak
