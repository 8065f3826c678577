"""A device by the figures of its data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
#: microseconds that a kernel takes on a GPU at least: launching, filling and draining one that has nothing to do
KERNEL_MICROSECONDS = 3.0
#: microseconds of the host for one op of eager PyTorch (Python, module, autograd, dispatcher, launch): what a small
#: batch takes in published tables, divided by its ops; the second is for the hosts that came with a V100 or T4
HOST_MICROSECONDS, HOST_2018_MICROSECONDS = 35.0, 60.0
_RATES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Device:
    """A device by its figures, in FLOP/s, bytes per second, bytes and seconds.

    Attributes:
        name: What users call it: ``"a100_80"``.
        title: Its full name.
        source: Where the figures come from.
        peak: Dense FLOP/s by the kind of unit, ``"fp32"``, ``"tf32"``, ``"fp16"`` and ``"bf16"``. A kind that the
            device has no units for is missing. A CPU that was measured also has ``"bf16:convolution"`` and the like.
        bandwidth: Of its memory.
        sms: Number of multiprocessors (compute units, cores), by which the work of a kernel is divided.
        memory: Bytes of its memory.
        link: Bytes per second to another device of its kind, in one direction.
        launch: Seconds that a kernel takes at least.
        host: Seconds that eager PyTorch needs on the host to issue one op.
        is_cpu: True for a CPU, where the host does the work itself.
    """

    name: str
    title: str
    source: str
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float
    sms: int
    memory: float
    link: float
    launch: float = KERNEL_MICROSECONDS * MICRO
    host: float = 0.0
    is_cpu: bool = False

    @property
    def has_tf32(self) -> bool:
        """True if products of fp32 operands may be computed by TF32 units."""
        return "tf32" in self.peak

    def unit(self, dtype: torch.dtype, *, tf32: bool = True) -> str:
        """The kind of unit that multiplies values of a dtype; ``"fp32"`` where there are no better ones."""
        name = _RATES.get(dtype, "fp32")
        if name == "fp32" and tf32 and self.has_tf32:
            return "tf32"
        return name if name in self.peak else "fp32"


def row(
    name: str, title: str, *, fp32: float, fp16: float | None, bf16: float | None, tf32: float | None,
    bandwidth: float, sms: int, memory: float, link: float, source: str, launch: float = KERNEL_MICROSECONDS,
    host: float | None = None,
) -> Device:  # fmt: skip
    """A device by the figures of a data sheet: TFLOP/s, GB/s, GB and microseconds."""
    rates = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16}
    return Device(
        name, title, source, {unit: rate * TERA for unit, rate in rates.items() if rate is not None},
        bandwidth * GIGA, sms, memory * GIGA, link * GIGA, launch * MICRO,
        (HOST_MICROSECONDS if host is None else host) * MICRO,
    )  # fmt: skip
