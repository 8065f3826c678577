"""Take an optimizer's step, or skip it if a gradient was not finite."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..common.torch_names import is_profiling, optimizer_post_hooks, optimizer_pre_hooks
from ..kernels.unscale import unscale_

_AROUND_STEP = Optimizer.profile_hook_step(lambda: None).__code__  # of the function that torch puts around ``step``
_TAKES_FLAG = "_step_supports_amp_scaling"  # how torch's fused optimizers say that they read found_inf and grad_scale


def apply_update(
    optimizer: Optimizer,
    found: Tensor,
    *,
    grad_scale: Tensor | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    overflowed: bool | None = None,
) -> tuple[Any, bool | None]:
    """Take the step or skip it; return what ``optimizer.step(*args, **kwargs)`` returned and whether the step was taken
    (None if the host doesn't know).

    ``found`` is an fp32 tensor of one element: 1.0 if a gradient is not finite, else 0.0. A fused optimizer reads it on
    its device, without a host sync. For any other, the host reads it once and calls ``step`` or doesn't. A skipped step
    changes neither the parameters nor the optimizer's state. ``grad_scale`` is the factor that the gradients are still
    multiplied by; None if they are unscaled. ``overflowed``: whether ``found`` is not 0, if the host has read it.
    """
    kwargs = kwargs or {}
    if not takes_found_inf(optimizer):
        if grad_scale is not None:
            unscale_(gradients(optimizer), inverse(grad_scale), found)
        if found.item() if overflowed is None else overflowed:
            return _left_out(optimizer)
        return take_step(optimizer, *args, **kwargs), True
    taken = None
    if not _start_momentum(optimizer):
        if found.item():
            return _left_out(optimizer)
        taken = True
    preset = getattr(optimizer, "grad_scale", None)  # a user may have set a divisor here
    if preset is not None and grad_scale is not None:
        grad_scale = grad_scale * preset
    target: Any = optimizer
    try:
        target.grad_scale = preset if grad_scale is None else grad_scale
        target.found_inf = found.reshape(())  # fused Adam subtracts it from step counts, which have no dimensions
        return take_step(optimizer, *args, **kwargs), taken
    finally:
        vars(optimizer).pop("grad_scale", None)
        vars(optimizer).pop("found_inf", None)


def take_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Call ``optimizer.step``. torch puts a function around the ``step`` of each class, which calls hooks and tells the
    profiler; where there are neither, what is inside is called directly: for a small model the rest takes longer."""
    own = optimizer.__dict__
    step: Any = getattr(type(optimizer), "step", None)  # None for a wrapper that only passes reads on
    if (
        getattr(step, "__code__", None) is not _AROUND_STEP  # another decorator is outside of torch's
        or "step" in own  # a scheduler, for example, has put a function around it
        or own.get("_optimizer_step_pre_hooks")
        or own.get("_optimizer_step_post_hooks")
        or optimizer_pre_hooks
        or optimizer_post_hooks
        or is_profiling()
    ):
        return optimizer.step(*args, **kwargs)
    return step.__wrapped__(optimizer, *args, **kwargs)


def takes_found_inf(optimizer: Optimizer) -> bool:
    """True if ``optimizer.step`` reads the attribute ``found_inf`` and skips the step itself.

    False for a wrapper that only forwards attribute reads, for an optimizer with a group that isn't fused, and for one
    that takes the scaler as an argument, as Apex's optimizers do.
    """
    if not (_TAKES_FLAG in vars(optimizer) or hasattr(type(optimizer), _TAKES_FLAG)):
        return False
    return (
        bool(getattr(optimizer, _TAKES_FLAG))
        and all(group.get("fused", True) for group in optimizer.param_groups)
        and not _wants_scaler(type(optimizer).step)
    )


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of all its parameters that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, rounded once; torch's CPU and CUDA kernels multiply by it."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


@functools.lru_cache(maxsize=64)
def _wants_scaler(step: Callable[..., Any]) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


def _left_out(optimizer: Optimizer) -> tuple[None, bool]:
    # torch 2.13: a learning-rate scheduler wraps ``optimizer.step`` to set this, and warns at its own first step if it
    # isn't set. A loop whose step is skipped here did call the two in the right order.
    target: Any = optimizer
    target._opt_called = True
    return None, False


def _start_momentum(optimizer: Optimizer) -> bool:
    """Make a skipped first step of fused SGD safe; return False if the host must read the flag instead.

    torch 2.13 passes uninitialised momentum buffers to the first step to fill, and keeps them even if that step is
    skipped. Buffers of zeros give the same first update, 0 · momentum + (1 - dampening) · gradient, if dampening is 0.
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
