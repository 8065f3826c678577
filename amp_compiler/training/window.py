"""The window of one update: the micro-batches whose gradients add up, and what a skipped update must put back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Batch:
    """One micro-batch as it was given, kept until the next window so that an overflow can be explained."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: Any
    rng: list[Tensor]
    found: Tensor | None = None  # 1 if a gradient was not finite, in this batch or an earlier one of the window


@dataclass
class Window:
    """Everything between two updates. ``size``: micro-batches an update."""

    size: int
    device: torch.device
    number: int = 0  # of the update
    done: int = 0  # micro-batches so far
    scale: Tensor | None = None  # None: no loss scaling
    found: Tensor | None = None
    saved: dict[str, Tensor] = field(default_factory=dict)  # the model's state before the window, by where it lies
    batches: list[Batch] = field(default_factory=list)

    def begin(self, scale: Tensor | None, parameters: Iterable[Tensor]) -> None:
        """A new window: no gradients yet. Those of the last update stay readable until here."""
        for parameter in parameters:
            parameter.grad = None
        self.number += 1
        self.done = 0
        self.saved.clear()
        self.batches.clear()
        self.scale = scale
        self.found = None if scale is None else torch.zeros(1, device=self.device)

    def add(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take over the gradients of one micro-batch, unscaled."""
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif parameter.grad.layout is torch.strided and gradient.layout is torch.strided:
                sums.append(parameter.grad)
                parts.append(gradient)
            else:
                parameter.grad = parameter.grad + gradient
        if sums:
            torch._foreach_add_(sums, parts)


def rng_state(device: torch.device) -> list[Tensor]:
    """The state of the generators that a batch can draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_rng_state(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
