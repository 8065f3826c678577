"""A training step's state as a dictionary, and back: all of it fits, or nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import AmpError, CheckpointError
from .window import rng_state, set_rng_state

if TYPE_CHECKING:
    from .step import TrainStep

FORMAT = "amp_compiler.TrainStep"
VERSION = 1
_KEYS = ("model", "optimizer", "scaler", "window", "rng")
#: entries of an optimizer's state that have the shape of their parameter, in all of torch.optim
_LIKE_PARAMETER = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "exp_inf",
        "prev",
        "step_size",
        "ax",
    }
)


def collect(step: TrainStep) -> dict[str, Any]:
    """Everything that a run needs to go on bit for bit."""
    window = step._window
    waiting = window.done > 0
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": step.model.state_dict(),
        "optimizer": step.optimizer.state_dict(),
        "scaler": None if step.scaler is None else step.scaler.state_dict(),
        "window": {
            "size": window.size,
            "done": window.done,
            "number": window.number,
            "scale": _clone(window.scale) if waiting else None,
            "found": _clone(window.found) if waiting else None,
            "saved": {name: t.clone() for name, t in window.saved.items()} if waiting else {},
            "gradients": {n: p.grad.clone() for n, p in _named(step).items() if p.grad is not None} if waiting else {},
        },
        "rng": rng_state(step._device),
    }


def restore(step: TrainStep, state: Any) -> None:
    """Check all of ``state`` against the step, then load it."""
    _check_kind(state)
    _check_model(step.model, state["model"])
    _check_optimizer(step.optimizer, state["optimizer"])
    _check_window(step, state["window"])
    _check_rng(state["rng"])
    if (state["scaler"] is None) != (step.scaler is None):
        have, want = ("no", "one") if state["scaler"] is None else ("a", "none")
        raise CheckpointError(
            f"The checkpoint has {have} loss scaler and this step has {want}: "
            "compile the step with the loss_scaler that the checkpoint was made with."
        )
    before = (None if step.scaler is None else step.scaler.state_dict(), step.optimizer.state_dict())
    weights = _copy_of(step.model) if _loads_by_itself(step.model) else None
    try:
        if step.scaler is not None:
            step.scaler.load_state_dict(state["scaler"])
        step.optimizer.load_state_dict(state["optimizer"])
        step.model.load_state_dict(state["model"])
    except (AmpError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if step.scaler is not None and before[0] is not None:
            step.scaler.load_state_dict(before[0])
        step.optimizer.load_state_dict(before[1])
        if weights is not None:
            step.model.load_state_dict(weights)
        raise CheckpointError(f"The checkpoint does not fit and nothing was changed: {error}") from error
    _load_window(step, state["window"])
    set_rng_state(state["rng"], step._device)


def _copy_of(model: nn.Module) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in model.state_dict().items()}


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _named(step: TrainStep) -> dict[str, Tensor]:
    """Every trained tensor by a name that another process gives it too."""
    names = {id(p): name for name, p in step.model.named_parameters()}
    return {names.get(id(p), f"optimizer.{i}"): p for i, p in enumerate(step._parameters())}


# ------------------------------------------------------------------------------------------------ checks


def _check_kind(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"A checkpoint of a training step is a dictionary, not a {type(state).__name__}: give what "
            "step.state_dict() returned, after torch.load."
        )
    if state.get("format") != FORMAT:
        looks = "a loss scaler's" if "growth_factor" in state else "a model's or an optimizer's"
        raise CheckpointError(
            f"This is no checkpoint of a training step (the key 'format' is missing or another); it may be "
            f"{looks}: load it into that object instead."
        )
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"The checkpoint has version {state.get('version')!r}; this amp_compiler reads {VERSION}."
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise CheckpointError(f"The checkpoint is damaged: {', '.join(missing)} missing.")


def _check_model(model: nn.Module, state: Any) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError("The checkpoint is damaged: 'model' is no dictionary.")
    own = model.state_dict()
    missing, extra = [k for k in own if k not in state], [k for k in state if k not in own]
    if missing or extra:
        told = [f"it lacks {missing[0]}"] * bool(missing) + [f"it has {extra[0]}, which the model has not"] * bool(
            extra
        )
        raise CheckpointError(f"The checkpoint is of another model: {' and '.join(told)}. Nothing was changed.")
    for key, value in own.items():
        if isinstance(value, Tensor):
            given = state[key]
            if not isinstance(given, Tensor):
                raise CheckpointError(f"The checkpoint is damaged: model entry {key} is a {type(given).__name__}.")
            if given.shape != value.shape:
                raise CheckpointError(
                    f"The checkpoint is of another model: {key} has the shape {list(given.shape)}, here it "
                    f"is {list(value.shape)}. Nothing was changed."
                )


def _check_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise CheckpointError("The checkpoint is damaged: 'optimizer' lacks its state or its param_groups.")
    own, given = [len(x["params"]) for x in optimizer.param_groups], [len(x["params"]) for x in state["param_groups"]]
    if own != given:
        raise CheckpointError(
            f"The checkpoint is of another optimizer: groups of {given} parameters, here {own}. Nothing was changed."
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in state["param_groups"] for i in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for name, value in state["state"].get(index, {}).items():
            if name in _LIKE_PARAMETER and isinstance(value, Tensor) and value.shape != parameter.shape:
                raise CheckpointError(
                    f"The checkpoint is of another optimizer: {name} of parameter {index} has the shape "
                    f"{list(value.shape)}, the parameter {list(parameter.shape)}. Nothing was changed."
                )


def _check_window(step: TrainStep, state: Any) -> None:
    keys = ("size", "done", "number", "scale", "found", "saved", "gradients")
    if not isinstance(state, Mapping) or any(key not in state for key in keys):
        raise CheckpointError("The checkpoint is damaged: 'window' is incomplete.")
    if state["done"] and state["size"] != step.accumulate_steps:
        raise CheckpointError(
            f"The checkpoint was made in the middle of an update of {state['size']} batches, and this step has "
            f"accumulate_steps={step.accumulate_steps}: they must agree, or save after an update."
        )
    named = _named(step)
    for name, gradient in state["gradients"].items():
        if name not in named or not isinstance(gradient, Tensor) or gradient.shape != named[name].shape:
            raise CheckpointError(
                f"The checkpoint is damaged: its gradient of {name} does not fit. Nothing was changed."
            )


def _check_rng(states: Any) -> None:
    try:
        torch.Generator().set_state(states[0])
    except (TypeError, RuntimeError, IndexError, KeyError) as error:
        raise CheckpointError(f"The checkpoint is damaged: the state of the random generator: {error}") from error


def _loads_by_itself(model: nn.Module) -> bool:
    """A module with loading code of its own can fail half-way."""
    return any(
        type(m)._load_from_state_dict is not nn.Module._load_from_state_dict
        or type(m).set_extra_state is not nn.Module.set_extra_state
        or m._load_state_dict_pre_hooks
        or m._load_state_dict_post_hooks
        for m in model.modules()
    )


def _load_window(step: TrainStep, state: Mapping[str, Any]) -> None:
    window, device = step._window, step._device
    window.done, window.number = state["done"], state["number"]
    window.batches.clear()
    window.saved = {name: t.to(device, copy=True) for name, t in state["saved"].items()}
    if window.done:
        window.scale = None if state["scale"] is None else state["scale"].to(device, copy=True)
        window.found = None if state["found"] is None else state["found"].to(device, copy=True)
        for name, parameter in _named(step).items():
            gradient = state["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
