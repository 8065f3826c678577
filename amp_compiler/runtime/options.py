"""The options of a compiled model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cost.device import Device
from ..cost.model import CostModel
from ..policy import Policy

BACKENDS = ("auto", "eager", "inductor")


@dataclass(frozen=True)
class Options:
    """The checked arguments of one ``amp_compile`` call."""

    policy: Policy
    backend: str = "auto"
    keep_output_dtypes: bool = True
    dynamic: bool | None = None
    fullgraph: bool = False
    disable_passes: tuple[str, ...] = ()
    #: whose costs place neutral ops
    device: Device | None = None

    def costs(self, backend: str) -> CostModel | None:
        """What ops cost on the device, if one was named; ``backend``: who runs them."""
        return CostModel(self.device, fused=backend == "inductor") if self.device is not None else None


def resolve_backend(backend: str, inputs: Sequence[Any]) -> str:
    """Return the backend; ``auto`` is inductor if one of the inputs is a CUDA tensor, eager otherwise."""
    if backend != "auto":
        return backend
    return "inductor" if any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs) else "eager"
