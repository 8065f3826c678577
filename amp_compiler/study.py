"""A model captured on fakes, for ``predict``: its graphs in fp32 and in mixed precision, and what each costs."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from . import ir
from .capture.autodiff import compile_graph
from .capture.export import Exported, capture_export
from .capture.fakes import fake_call, sizes_from_data
from .common.errors import ArgumentError
from .common.torch_names import pytree
from .cost.devices import Device
from .cost.graph import AS_ASSUMED, LAUNCH, LINK, UPDATE, GraphCost, Speed, graph_cost
from .cost.model import CostModel
from .cost.optimizers import find_optimizer
from .passes import order
from .policy import Policy, default_dtype, dtype_name
from .rewrite.base import Context
from .runtime.arguments import check_request

#: bytes for each parameter of checking gradients and dividing them by the loss scale, in place
_UNSCALE = 8


@dataclass(frozen=True)
class Step:
    """What one step or one inference costs: its graph, and what comes after it."""

    graph: GraphCost
    update: float
    link: float

    def seconds(self, speed: Speed = AS_ASSUMED) -> float:
        return sum(self.breakdown(speed).values())

    def breakdown(self, speed: Speed = AS_ASSUMED) -> dict[str, float]:
        """Seconds by what they are spent on. Where the host is slower than the device, the device waits: launch."""
        found = self.graph.busy(speed)
        found[LAUNCH] += max(self.graph.host(speed) - sum(found.values()), 0.0)
        found[UPDATE] = self.update / speed.memory
        found[LINK] = max(self.link - self.graph.backward, 0.0)  # the collectives run beside the backward
        return found


class _Captured(Exception):
    """The functional graph is there; it is not to be compiled."""


class Study:
    """A model captured on fakes, and its graphs in fp32 and in mixed precision, each made once."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy, training: bool,
        optimizer: str, backend: str, world_size: int, cpu_kernels: bool,
    ) -> None:  # fmt: skip
        self.model, self.args, self.kwargs, self.policy = model, args, kwargs, policy
        self.training, self.optimizer, self.backend, self.world_size = training, optimizer, backend, world_size
        self.disable = () if cpu_kernels else order.OF_THIS_CPU
        self.parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._graphs: dict[bool, fx.GraphModule] = {}
        self._larger: dict[tuple[int, str], Study] = {}

    @classmethod
    def of(
        cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, level: str, dtype: Any,
        device: Device, training: bool, policy: Policy | None, optimizer: str, backend: str, world_size: int,
    ) -> Study:  # fmt: skip
        """Check the arguments of ``predict``."""
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
        if not isinstance(args, (tuple, list)):
            raise ArgumentError(f"args must be a tuple of inputs, not {type(args).__name__}: write (x,).")
        find_optimizer(optimizer)
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ArgumentError(f"world_size must be a number of processes, at least 1, not {world_size!r}.")
        asked = check_request(level, dtype, policy, (), (), (), backend, ())
        chosen = asked.policy
        if chosen.dtype is None:
            chosen = dataclasses.replace(chosen, dtype=asked.dtype or default_dtype("cpu" if device.is_cpu else "cuda"))
        kind = "eager" if backend == "auto" else backend
        return cls(model, tuple(args), dict(kwargs or {}), chosen, training, optimizer, kind, world_size, device.is_cpu)

    def at(self, policy: Policy) -> Study:
        """The same by another policy of the same dtype: what was captured, and the graph in fp32, are shared."""
        other = copy.copy(self)
        other.policy, other._graphs = policy, {False: self.graph(False)}
        return other

    @property
    def batch(self) -> int | None:
        """The first size of the first tensor among the inputs."""
        found = [t for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, torch.Tensor) and t.dim()]
        return int(found[0].shape[0]) if found else None

    def larger(self, times: int) -> Study | None:
        """The same with a larger batch; None if the inputs have none."""
        batch, key = self.batch, (times, self.policy.level)
        if batch is None:
            return None
        if key in self._larger:
            return self._larger[key]

        def grow(value: torch.Tensor) -> torch.Tensor:
            if not value.dim() or value.shape[0] != batch:
                return value
            return torch.empty((batch * times, *value.shape[1:]), dtype=value.dtype, device="meta")

        args, kwargs = pytree.tree_map_only(torch.Tensor, grow, (self.args, self.kwargs))
        self._larger[key] = Study(self.model, args, kwargs, self.policy, self.training, self.optimizer, self.backend,
                                  self.world_size, not self.disable)  # fmt: skip
        return self._larger[key]

    @cached_property
    def captured(self) -> Exported:
        model, args, kwargs = fake_call(self.model, self.args, self.kwargs)
        model.train(self.training)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = capture_export(model, args, kwargs, low=self.policy.low, inference=not self.training,
                                   policy=self.policy)  # fmt: skip
        _without_attention_dropout(found.graph)
        return found

    def step(self, device: Device, mixed: bool, *, tf32: bool = True) -> Step:
        """What a step costs on a device."""
        cost = graph_cost(self.graph(mixed), CostModel(device, fused=self.backend == "inductor", tf32=tf32))
        if not self.training:
            return Step(cost, 0.0, 0.0)
        unscale = _UNSCALE if mixed and self.policy.low is torch.float16 else 0
        update = self.parameters * (find_optimizer(self.optimizer).moved + unscale) / device.bandwidth
        share = 2 * (self.world_size - 1) / self.world_size  # of a ring: everything goes out and comes back
        return Step(cost, update, share * 4 * self.parameters / device.link)

    def graph(self, mixed: bool) -> fx.GraphModule:
        """The functional graph, with its backward in a training step."""
        if mixed not in self._graphs:
            self._graphs[mixed] = self._make(mixed)
        return self._graphs[mixed]

    def _make(self, mixed: bool) -> fx.GraphModule:
        gm = ir.copy_graph(self.captured.graph)
        steps = order.build(self.disable)
        ctx = Context(self.policy, twin=self.captured.twin, backend=self.backend)
        if mixed:
            steps.forward.run(gm, ctx, [], graph="forward")
        inputs = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
        found: list[fx.GraphModule] = []

        def passes(functional: fx.GraphModule, kind: str) -> None:
            if mixed:
                pipeline = steps.joint if kind == "joint" else steps.inference
                pipeline.run(functional, ctx, [], graph=kind, after="autodiff")
            found.append(functional)
            raise _Captured

        try:
            with sizes_from_data(), torch.enable_grad() if self.training else torch.no_grad():
                compile_graph(gm, inputs, "eager", passes)
        except Exception:  # ours, as whatever torch makes of it on its way; anything else came before the graph
            if not found:
                raise
        return found[0]

    def notes(self, device: Device, low: Step) -> list[str]:
        """What a reader should know of the prediction."""
        told = []
        if low.graph.unknown:
            told.append(
                f"{len(low.graph.unknown)} results have a size that depends on the data (the first is "
                f"{low.graph.unknown[0]}): such a size counts as 1, so what follows from it is left out"
            )
        if not device.is_cpu and device.unit(self.policy.low) == "fp32":
            told.append(f"{device.title} has no {dtype_name(self.policy.low)} units: products run at fp32's rate")
        if low.graph.peak_bytes > device.memory:
            told.append(f"it needs more than the device's {device.memory / 1e9:.0f} GB of memory")
        if self.captured.twin_failed:
            told.append(f"the code could not be traced in the low dtype: {self.captured.twin_failed}")
        return told


def _without_attention_dropout(gm: fx.GraphModule) -> None:
    """Attention on a GPU draws its dropout inside the kernel; on the CPU, for which the graph is traced, it would be
    taken apart."""
    for _, inner in ir.all_graphs(gm):
        for node in inner.graph.nodes:
            if node.op == "call_function" and ir.op_name(node) == "scaled_dot_product_attention":
                node.args = (*node.args[:4], 0.0, *node.args[5:]) if len(node.args) > 4 else node.args
                node.kwargs = {**node.kwargs, **({"dropout_p": 0.0} if "dropout_p" in node.kwargs else {})}
