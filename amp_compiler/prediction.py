"""``predict``: how long a model takes on a device that need not be here, in fp32 and in mixed precision."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .cost.devices import Device, find
from .cost.graph import CASTS, COMPUTE, LAUNCH, LINK, MEMORY, UPDATE, Speed
from .cost.optimizers import find_optimizer
from .policy import DEFAULT_LEVEL, Policy, dtype_name
from .study import Step, Study

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
    state = study.parameters * find_optimizer(study.optimizer).kept if study.training else 0
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
