"""``predict``: how long a model takes on a device that need not be here, in fp32 and in mixed precision."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from . import ir
from .capture.autodiff import compile_graph
from .capture.export import Exported, capture_export
from .capture.fakes import fake_call, sizes_from_data
from .common.errors import ArgumentError
from .common.messages import suggestion
from .common.torch_names import pytree
from .cost.devices import Device, find
from .cost.graph import AS_ASSUMED, CASTS, COMPUTE, LAUNCH, LINK, MEMORY, UPDATE, GraphCost, Speed, graph_cost
from .cost.model import CostModel
from .passes import order
from .policy import DEFAULT_LEVEL, Policy, default_dtype, dtype_name
from .rewrite.base import Context
from .runtime.arguments import check_request

#: bytes that an optimizer reads and writes for each parameter: the weight, its gradient and what it keeps, in fp32
OPTIMIZERS = {"none": 0, "sgd": 12, "momentum": 20, "adamw": 28}
#: bytes that it keeps
_STATE = {"none": 0, "sgd": 0, "momentum": 4, "adamw": 8}
#: bytes for each parameter of checking gradients and dividing them by the loss scale, in place
_UNSCALE = 8
#: passes that choose kernels for the CPU that is here
_CPU_KERNELS = ("fuse_cast_matmul", "lower_kernels")
#: how far the assumptions may be off, as factors
_DOUBTS = (
    (Speed(matrix=0.8), Speed(matrix=1.25)), (Speed(ordinary=0.87), Speed(ordinary=1.15)),
    (Speed(memory=0.87), Speed(memory=1.15)), (Speed(host=0.5), Speed(host=2.0)),
    (Speed(casts=0.5), Speed(casts=2.0)),
)  # fmt: skip
#: how far the time of either side may be off by itself: a library has better and worse kernels for a shape
_KERNELS = 0.1
#: speed-up below which mixed precision does not pay
PAYS = 1.05
_LARGER = (8, 64)  # batches that are tried, as multiples


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


@dataclass(frozen=True)
class Prediction:
    """What ``predict`` found for one device and one level; ``predict`` makes it.

    Attributes:
        device: The device.
        level: The level of mixed precision.
        dtype: The low dtype.
        training: True for a training step, False for an inference.
        seconds: Of a step in mixed precision.
        fp32_seconds: Of the same step in fp32. Where the device has TF32 units, products and convolutions run on them.
        strict_fp32_seconds: The same without TF32.
        band: The speed-up if the assumptions are off by what is usual, (low, high).
        breakdown: Seconds of the step in mixed precision by what they are spent on: ``"compute"`` (products that wait
            for the units), ``"memory"`` (kernels that wait for memory), ``"casts"``, ``"launch"`` (waiting for the
            host, and starting kernels), ``"optimizer"`` and ``"communication"``. They add up to ``seconds``.
        fp32_breakdown: The same of the step in fp32.
        memory: Bytes that are in use at the worst moment, with the optimizer's state.
        fp32_memory: The same in fp32.
        notes: What was assumed.

    Examples:
        >>> import torch
        >>> from amp_compiler import predict
        >>> found = predict(torch.nn.Linear(8, 8), (torch.ones(4, 8),), device="t4", training=False)
        >>> found.pays, found.bound
        (False, 'launch')
    """

    device: Device
    level: str
    dtype: torch.dtype
    training: bool
    seconds: float
    fp32_seconds: float
    strict_fp32_seconds: float
    band: tuple[float, float]
    breakdown: dict[str, float]
    fp32_breakdown: dict[str, float]
    memory: int
    fp32_memory: int
    notes: tuple[str, ...]
    low: Step = field(repr=False)
    study: Study = field(repr=False)

    @property
    def speedup(self) -> float:
        """How many times faster than fp32 (with TF32, where the device has it)."""
        return self.fp32_seconds / self.seconds if self.seconds else 1.0

    @property
    def baseline(self) -> str:
        """What ``fp32_seconds`` are of: ``"tf32"`` or ``"fp32"``."""
        return "tf32" if self.device.has_tf32 else "fp32"

    @property
    def pays(self) -> bool:
        """True if mixed precision is worth it in time."""
        return self.speedup >= PAYS

    @property
    def bound(self) -> str:
        """What takes the most time in mixed precision, one of the names of ``breakdown``."""
        return max(self.breakdown, key=lambda kind: self.breakdown[kind])

    @property
    def reason(self) -> str:
        """Why it is as fast as it is, in words."""
        share = self.breakdown[self.bound] / self.seconds if self.seconds else 0.0
        if not any(kernel.flops for kernel in self.low.graph.kernels):
            return "the model has no matrix product or convolution"
        return f"{share:.0%} of the time {_WORDS[self.bound]}"

    @cached_property
    def pays_from(self) -> int | None:
        """The batch size from which mixed precision pays, of those that are 8 and 64 times as large; None if it
        does not pay at any, or the inputs have no common first dimension. Every size is captured anew."""
        if self.pays:
            return self.study.batch
        for times in _LARGER:
            larger = self.study.larger(times)
            if larger is None:
                return None
            if predict_study(larger, self.device).pays:
                return larger.batch
        return None

    def to_json(self) -> dict[str, Any]:
        """The prediction as a JSON document."""
        return {
            "device": self.device.name, "title": self.device.title, "source": self.device.source, "level": self.level,
            "dtype": dtype_name(self.dtype), "training": self.training, "seconds": self.seconds,
            "fp32_seconds": self.fp32_seconds, "strict_fp32_seconds": self.strict_fp32_seconds,
            "baseline": self.baseline, "speedup": self.speedup, "band": list(self.band), "bound": self.bound,
            "breakdown": self.breakdown, "fp32_breakdown": self.fp32_breakdown, "memory": self.memory,
            "fp32_memory": self.fp32_memory, "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        low, high = self.band
        what = "a training step" if self.training else "an inference"
        return (
            f"{self.level} {dtype_name(self.dtype)} on {self.device.title}: {what} of {self.seconds * 1e3:.3g} ms, "
            f"{self.speedup:.2f} times as fast as {self.baseline} ({low:.2f} to {high:.2f}); {self.reason}"
        )


_WORDS = {
    COMPUTE: "goes into matrix products and convolutions",
    MEMORY: "goes into moving data that products do not hide",
    CASTS: "goes into casts",
    LAUNCH: "is spent waiting for the host to issue ops",
    UPDATE: "goes into the optimizer",
    LINK: "is spent waiting for gradients of other devices",
}


def predict(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | os.PathLike[str] | Device,
    level: str = DEFAULT_LEVEL,
    dtype: torch.dtype | str | None = None,
    training: bool = True,
    policy: Policy | None = None,
    optimizer: str = "adamw",
    backend: str = "eager",
    world_size: int = 1,
) -> Prediction:
    """Predict how long a model takes on a device, in fp32 and in mixed precision, from shapes and a data sheet.

    Nothing runs: weights and inputs are replaced by fakes, so the model may be on the meta device. The model must be
    one that ``torch.export`` can capture.

    Args:
        model: The module.
        args: Positional inputs, real or on the meta device; only shapes and dtypes count.
        kwargs: Keyword inputs.
        device: A device's name such as ``"a100_80"``, or the path of a TOML file that describes one.
        level: As for ``amp_compile``.
        dtype: The low dtype; by default fp16 on a GPU and bf16 on a CPU.
        training: Predict a training step (forward, backward, optimizer); False for an inference. Without a loss in the
            model's output, the backward begins at its outputs.
        policy: As for ``amp_compile``.
        optimizer: ``"adamw"``, ``"momentum"``, ``"sgd"`` or ``"none"``, whose traffic is counted.
        backend: ``"eager"``, or ``"inductor"`` for chains of element-wise ops as one kernel, on both sides.
        world_size: Number of data-parallel processes, whose gradients are summed over the device's link.

    Returns:
        A ``Prediction``.

    Examples:
        >>> import torch
        >>> from amp_compiler import predict
        >>> with torch.device("meta"):
        ...     model, x = torch.nn.Linear(8192, 8192), torch.empty(2048, 8192)
        >>> found = predict(model, (x,), device="v100_sxm2", training=False)
        >>> 3 < found.speedup < 8
        True
    """
    study = Study.of(model, args, kwargs, level, dtype, find(device), training, policy, optimizer, backend, world_size)
    return predict_study(study, find(device))


def predict_study(study: Study, device: Device) -> Prediction:
    """The prediction for one device of a model that was captured before."""
    base, low = study.step(device, False), study.step(device, True)
    strict = study.step(device, False, tf32=False) if device.has_tf32 else base
    state = study.parameters * _STATE[study.optimizer] if study.training else 0
    return Prediction(
        device, study.policy.level, study.policy.low, study.training, low.seconds(), base.seconds(), strict.seconds(),
        band_of(base, low), low.breakdown(), base.breakdown(), low.graph.peak_bytes + state,
        base.graph.peak_bytes + state, tuple(study.notes(device, low)), low, study,
    )  # fmt: skip


def band_of(base: Step, low: Step) -> tuple[float, float]:
    """The speed-up with each assumption off by itself, the deviations added as independent ones are."""
    middle = math.log(max(base.seconds(), 1e-12) / max(low.seconds(), 1e-12))
    down = up = 2 * _KERNELS**2
    for pair in _DOUBTS:
        moved = [math.log(max(base.seconds(s), 1e-12) / max(low.seconds(s), 1e-12)) - middle for s in pair]
        down, up = down + min(*moved, 0.0) ** 2, up + max(*moved, 0.0) ** 2
    return math.exp(middle - math.sqrt(down)), math.exp(middle + math.sqrt(up))


# -------------------------------------------------------------------------------------------------- the graphs


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
        self.disable = () if cpu_kernels else _CPU_KERNELS
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
        if optimizer not in OPTIMIZERS:
            raise ArgumentError(
                f"Unknown optimizer {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}.",
                hint=suggestion(str(optimizer), OPTIMIZERS),
            )
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
            found = capture_export(model, args, kwargs, low=self.policy.low, inference=not self.training)
        _without_attention_dropout(found.graph)
        return found

    def step(self, device: Device, mixed: bool, *, tf32: bool = True) -> Step:
        """What a step costs on a device."""
        cost = graph_cost(self.graph(mixed), CostModel(device, fused=self.backend == "inductor", tf32=tf32))
        if not self.training:
            return Step(cost, 0.0, 0.0)
        unscale = _UNSCALE if mixed and self.policy.low is torch.float16 else 0
        update = self.parameters * (OPTIMIZERS[self.optimizer] + unscale) / device.bandwidth
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
        except Exception:
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
