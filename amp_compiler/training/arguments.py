"""Checks of the arguments that only ``compile_train_step`` has; shared ones are in ``runtime/arguments.py``."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import nn

from ..common.errors import AmpWarning, ArgumentError
from ..common.messages import users_frame
from ..common.notice import tell
from ..ir.nesting import compiled_policy
from ..policy import dtype_name
from ..runtime.low_parameters import trained_low_dtype
from .masters import METHODS
from .scaler_base import LossScaler
from .scalers import DynamicLossScaler, StaticLossScaler

_TOLD: dict[bool | str, str] = {
    True: "the optimizer updates fp32 masters of them, which it keeps in its state",
    "stochastic": "their updates are made in fp32 and rounded stochastically",
    "kahan": "their updates are made in fp32, and what the rounding loses is kept",
}
_SCALERS = 'loss_scaler is "dynamic", a DynamicLossScaler, a StaticLossScaler, a number (a fixed scale) or None'


def check_model(model: Any) -> None:
    """Raise if ``model`` isn't a module, has no values or is compiled already."""
    if compiled_policy(model) is not None:
        raise ArgumentError("This module was already compiled by amp_compile: pass model.original instead.")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"compile_train_step takes a torch.nn.Module, not {type(model).__name__}.")
    if any(p.is_meta for p in model.parameters()):
        raise ArgumentError(
            "The model is on the meta device and has no values: allocate them with model.to_empty(device=…)."
        )


def check_numbers(accumulate_steps: Any, max_grad_norm: Any, health_every: Any = None) -> None:
    """Raise unless ``accumulate_steps`` is a positive int, ``max_grad_norm`` a positive number or None, and
    ``health_every`` a positive int or None."""
    if health_every is not None and (type(health_every) is not int or health_every < 1):
        raise ArgumentError(f"health_every must be a whole number of at least 1 or None, not {health_every!r}.")
    if isinstance(accumulate_steps, bool) or not isinstance(accumulate_steps, int) or accumulate_steps < 1:
        raise ArgumentError(f"accumulate_steps must be a whole number of at least 1, not {accumulate_steps!r}.")
    if max_grad_norm is not None and (
        isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, (int, float)) or not max_grad_norm > 0
    ):
        raise ArgumentError(f"max_grad_norm must be a positive number or None, not {max_grad_norm!r}.")


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise if ``optimizer`` holds none of the model's parameters or needs a closure."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ArgumentError(
            f"{type(optimizer).__name__} evaluates the model several times per update through a closure, which a "
            "compiled step with loss scaling does not support: use amp_compile in your own training loop, in bfloat16."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise ArgumentError(
            "The optimizer holds none of the model's parameters: create it from model.parameters(), after moving the "
            "model to its device and dtype."
        )


def check_method(master_weights: Any) -> None:
    """Raise unless ``master_weights`` is one of the ways to update low-precision parameters."""
    if not any(master_weights is method or master_weights == method != 1 for method in METHODS):
        raise ArgumentError(f'master_weights is True, False, "stochastic" or "kahan", not {master_weights!r}.')


def check_method_of_parts(master_weights: bool | str) -> None:
    """Raise if parameters of which each process has a part cannot be updated like this."""
    if master_weights == "stochastic":
        raise ArgumentError(
            'master_weights="stochastic" draws random numbers for whole parameters, and parallel=Sharded(...) divides '
            'them: use "kahan", or True, whose masters are divided too.'
        )


def tell_of_low_parameters(model: nn.Module, method: bool | str, dtype: torch.dtype | None) -> None:
    """Tell how parameters that are stored in low precision are updated; warn if small updates are lost. ``dtype``: the
    low-precision dtype that the user asked for, if any."""
    low = trained_low_dtype(model)
    if low is None:
        return
    other = ""
    if dtype is not None and dtype is not low:
        to = "half" if dtype is torch.float16 else "bfloat16"
        other = (
            f" What is computed from them stays {dtype_name(low)}: for {dtype_name(dtype)}, convert the model first, "
            f"by model.float() or model.{to}()."
        )
    if method is not False:
        tell(f"parameters are {dtype_name(low)}: {_TOLD[method]} (master_weights={method!r}).{other}")
        return
    warnings.warn(
        f"The model's parameters are {dtype_name(low)}: with master_weights=False, small updates are lost to rounding "
        'and gradients are rounded too. Leave master_weights=True, or use "stochastic" or "kahan", which need less '
        f"memory.{other}",
        AmpWarning,
        stacklevel=users_frame(),
    )


def make_scaler(asked: Any) -> LossScaler | None:
    """Return the scaler that the argument ``loss_scaler`` stands for."""
    if asked is None:
        return None
    if isinstance(asked, LossScaler):
        return asked if asked.is_enabled() else None
    if isinstance(asked, str):
        if asked == "dynamic":
            return DynamicLossScaler()
        raise ArgumentError(f"Unknown loss_scaler {asked!r}: {_SCALERS}.")
    if isinstance(asked, (int, float)) and not isinstance(asked, bool):
        return StaticLossScaler(float(asked))
    if isinstance(asked, torch.amp.GradScaler):
        raise ArgumentError(
            "A torch.amp.GradScaler cannot be part of a graph: pass a DynamicLossScaler(). To continue with the same "
            "scale, call its load_state_dict(grad_scaler.state_dict()) first."
        )
    raise ArgumentError(f"{_SCALERS}, not {type(asked).__name__}.")
