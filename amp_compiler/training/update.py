"""Take an optimizer's step, or leave it if a gradient was not finite."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..kernels.unscale import unscale_

_TAKES_FLAG = "_step_supports_amp_scaling"  # how torch's fused optimizers say that they read found_inf and grad_scale


def apply_update(
    optimizer: Optimizer,
    found: Tensor,
    *,
    grad_scale: Tensor | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, bool | None]:
    """(what ``optimizer.step(*args, **kwargs)`` returned, was the step taken?), ``None`` for "the host cannot know".

    ``found`` is an fp32 tensor of one element: 1.0 if a gradient is not finite, else 0.0. A fused optimizer reads it on
    its device, without a host sync. For any other the host reads it, once, and leaves ``step`` out or calls it. A step
    that is left out changes neither parameters nor what the optimizer will do later. ``grad_scale`` says that the
    gradients are still multiplied by it; ``None``: they are not.
    """
    kwargs = kwargs or {}
    if not takes_found_inf(optimizer):
        if grad_scale is not None:
            unscale_(gradients(optimizer), inverse(grad_scale), found)
        if found.item():
            return _left_out(optimizer)
        return optimizer.step(*args, **kwargs), True
    taken = None
    if not _start_momentum(optimizer):
        if found.item():
            return _left_out(optimizer)
        taken = True
    preset = getattr(optimizer, "grad_scale", None)  # a user may have put a divisor of his own here
    if preset is not None and grad_scale is not None:
        grad_scale = grad_scale * preset
    target: Any = optimizer
    try:
        target.grad_scale = preset if grad_scale is None else grad_scale
        target.found_inf = found.reshape(())  # fused Adam subtracts it from step counts, which have no dimensions
        return optimizer.step(*args, **kwargs), taken
    finally:
        vars(optimizer).pop("grad_scale", None)
        vars(optimizer).pop("found_inf", None)


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Does ``optimizer.step`` itself leave the step out where its attribute ``found_inf`` says so?

    A wrapper that only passes attribute reads on does not, nor an optimizer with one group that is not fused, nor
    one that wants the scaler as an argument, as Apex's do.
    """
    if not (_TAKES_FLAG in vars(optimizer) or hasattr(type(optimizer), _TAKES_FLAG)):
        return False
    return (
        bool(getattr(optimizer, _TAKES_FLAG))
        and all(group.get("fused", True) for group in optimizer.param_groups)
        and not _wants_scaler(type(optimizer).step)
    )


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of all its parameters that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, rounded once; torch's CPU and CUDA kernels multiply by it."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


@functools.lru_cache(maxsize=64)
def _wants_scaler(step: Callable[..., Any]) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


def _left_out(optimizer: Optimizer) -> tuple[None, bool]:
    # torch 2.13: a learning-rate scheduler's first step warns that it came before the optimizer's unless this is set,
    # which its wrapper of ``optimizer.step`` does. Here the loop did call the two in order.
    target: Any = optimizer
    target._opt_called = True
    return None, False


def _start_momentum(optimizer: Optimizer) -> bool:
    """Make a skipped first step of fused SGD safe; False where only a look at the flag can.

    torch 2.13 gives the first step uninitialised momentum buffers to fill, and keeps them when that step is skipped.
    A buffer of zeros makes the first update the same: 0 · momentum + (1 - dampening) · gradient, if dampening is 0.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    safe = True
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        for p in group["params"]:
            started = optimizer.state.get(p, {}).get("momentum_buffer") is not None
            if started or p.grad is None:
                continue
            if group["dampening"] == 0:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
            else:
                safe = False
    return safe
