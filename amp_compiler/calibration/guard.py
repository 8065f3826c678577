"""Keep a model as it was while a user's function evaluates it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..common.errors import SearchError


class Guard:
    """A copy of a model's parameters, buffers and modes, which are compared and restored after each evaluation."""

    def __init__(self, model: Any) -> None:
        self.model = model if isinstance(model, nn.Module) else nn.Module()
        self._modes = [(module, module.training) for module in self.model.modules()]
        self._values = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}

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
        for module, training in self._modes:
            module.training = training
        return changed


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
