"""Means over the samples of an epoch, added up on the device: the host waits for them once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..common.errors import ArgumentError
from ..common.torch_names import pytree
from ..training.results import StepResult

Metrics = Mapping[str, Callable[[Any, Any], Any]]


class Totals:
    """Sums over samples. A batch counts by the size of its inputs' first dimension."""

    def __init__(self, metrics: Metrics, device: torch.device) -> None:
        self.metrics, self.device = metrics, device
        self.dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no fp64
        self.sums: dict[str, Tensor] = {}
        self.updates = self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.samples, self.waiting, self.seconds = 0, 0, 0.0

    def add(self, inputs: Any, targets: Any, loss: Tensor, output: Any) -> None:
        """Add the loss and the metrics of a batch. Without targets, a metric gets the batch, which may have labels."""
        given = inputs if targets is None else targets
        with torch.no_grad():
            size = _size(inputs)
            values = {"loss": loss, **{name: _scalar(name, f(output, given)) for name, f in self.metrics.items()}}
            for name, value in values.items():
                term = torch.as_tensor(value, dtype=self.dtype, device=self.device).reshape(()) * size
                self.sums[name] = self.sums[name] + term if name in self.sums else term
        self.samples += size

    def see(self, result: StepResult) -> None:
        """Count an update, or one that was skipped."""
        self.updates = self.updates + result.updated
        self.skipped = self.skipped + result.skipped

    def means(self) -> dict[str, float]:
        """Return the means; this waits for the device."""
        return {name: float(total) / self.samples for name, total in self.sums.items()}

    def state(self) -> dict[str, Any]:
        counts = {"updates": int(self.updates), "skipped": int(self.skipped), "samples": self.samples}
        sums = {name: float(total) for name, total in self.sums.items()}
        return {"sums": sums, **counts, "waiting": self.waiting, "seconds": self.seconds}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sums = {n: torch.tensor(v, dtype=self.dtype, device=self.device) for n, v in state["sums"].items()}
        self.updates, self.skipped = (torch.tensor(state[n], device=self.device) for n in ("updates", "skipped"))
        self.samples, self.waiting, self.seconds = state["samples"], state["waiting"], state["seconds"]


def check_metrics(metrics: Any) -> Metrics:
    """Return the metrics by name; raise unless they are functions."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(n, str) and callable(f) for n, f in metrics.items()):
        raise ArgumentError(
            "metrics is a dict of names and functions of (output, targets), such as {'accuracy': lambda output, "
            f"targets: (output.argmax(-1) == targets).float().mean()}}, not {metrics!r}."
        )
    if "loss" in metrics:
        raise ArgumentError("A metric cannot be called 'loss': that is the name of the loss itself.")
    return metrics


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ArgumentError(
            f"The metric {name!r} gives a tensor of the shape {list(value.shape)}: return a number, such as its mean."
        )
    if not isinstance(value, (Tensor, int, float)):
        raise ArgumentError(f"The metric {name!r} gives a {type(value).__name__}: return a number or a scalar tensor.")
    return value


def _size(inputs: Any) -> int:
    tensors = (t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))
    return next((len(t) for t in tensors if t.dim()), 1)
