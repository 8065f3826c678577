"""The state that an optimizer will have after its first step, as something to load a checkpoint into.

``torch.distributed.checkpoint`` loads into the tensors of a state dictionary, and an optimizer makes its tensors at its
first step only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ..common.gradients import set_gradient
from .masters import LowWeights


def full_state_dict(optimizer: Optimizer, weights: LowWeights) -> dict[str, Any]:
    """The optimizer's ``state_dict()``; before its first step, with the entries that it will have afterwards. Their
    values say nothing then. The optimizer and its parameters stay as they are."""
    if optimizer.state:
        return optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    rates = [group.get("lr") for group in optimizer.param_groups]
    gradients = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            set_gradient(parameter, torch.zeros_like(parameter, requires_grad=False))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        # the class's own: a learning-rate scheduler counts the calls of the instance's
        step: Any = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        try:
            with torch.no_grad(), weights.updating(optimizer):
                step(optimizer)
        except TypeError:  # it needs a closure
            return optimizer.state_dict()
        return with_rates(optimizer.state_dict(), rates)
    finally:
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                parameter.grad = None
            else:
                set_gradient(parameter, gradient)


def with_rates(state: dict[str, Any], rates: list[Any]) -> dict[str, Any]:
    """The same with these learning rates."""
    for group, rate in zip(state["param_groups"], rates, strict=True):
        if rate is not None:
            group["lr"] = rate
    return state
