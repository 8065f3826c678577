"""Keep a model as it was while a user's function evaluates it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..common.errors import SearchError


class Guard:
    """A copy of a model's parameters, buffers and modes, which are compared and restored after each evaluation.

    Gradients are restored too, so that an evaluation that runs a backward does not add to those of the one before. They
    are not counted as a change: a backward is what a metric of gradients needs.
    """

    def __init__(self, model: Any) -> None:
        self.model = model if isinstance(model, nn.Module) else nn.Module()
        self._modes = [(module, module.training) for module in self.model.modules()]
        self._values = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        self._gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone())
                           for p in self.model.parameters()]  # fmt: skip

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def restore(self) -> list[str]:
        """Put back what has changed; return the names of the tensors that had."""
        now = self._tensors()
        for name, copy in self._values.items():
            if name not in now or (now[name].shape, now[name].dtype) != (copy.shape, copy.dtype):
                raise SearchError(
                    f"evaluate replaced {name!r} of the model by something else, so its trials cannot be compared: "
                    "have it work on a copy (copy.deepcopy)."
                )
        changed = [name for name, copy in self._values.items() if not _same(now[name].detach(), copy)]
        with torch.no_grad():
            for name in changed:
                now[name].copy_(self._values[name])
            for parameter, gradient, value in self._gradients:
                parameter.grad = gradient
                if gradient is not None and value is not None and not _same(gradient, value):
                    gradient.copy_(value)
        for module, training in self._modes:
            module.training = training
        return changed


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
