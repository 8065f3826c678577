"""Save a training step's state as a dictionary and load it again: either all of it fits, or nothing is changed.

The dictionary carries a table of its own contents (the type, shape and dtype of every entry), so that damage is found
before anything is loaded. An intact one is then compared with the current model, optimizer and scaler.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import AmpWarning, CheckpointError
from ..common.gradients import LOW, set_gradient
from ..common.messages import users_frame
from ..common.torch_names import loads_by_itself
from ..policy import Policy, dtype_name
from .fresh import full_state_dict
from .masters import LowWeights
from .owner import Owner
from .scaler_base import LossScaler
from .window import Window, rng_state, set_rng_state

FORMAT = "amp_compiler.TrainStep"
VERSION = 1
CONTENTS = "contents"
_UNCHANGED = "Nothing was changed."
#: a run may continue with its weights in another of these dtypes
_ROUNDED = {torch.float32, *LOW}


@dataclass(frozen=True)
class Run:
    """The objects whose state a checkpoint holds."""

    owner: Owner
    scaler: LossScaler | None
    window: Window
    device: torch.device
    policy: Policy
    weights: LowWeights
    #: of this process, where each has a part of the parameters; None if each has all
    part: int | None = None


def collect(run: Run) -> dict[str, Any]:
    """Return everything that a run needs to continue bit for bit."""
    run.owner.look()
    window = run.window
    waiting = window.done > 0
    gradients = {name: p.grad.clone() for name, p in _named(run).items() if p.grad is not None} if waiting else {}
    optimizer = run.owner.optimizer
    state = {
        "format": FORMAT,
        "version": VERSION,
        "model": run.owner.model.state_dict(),
        "loss_fn": run.owner.loss_fn.state_dict() if isinstance(run.owner.loss_fn, nn.Module) else None,
        "others": {name: p.detach() for name, p in run.owner.others().items()},
        "optimizer": optimizer.state_dict() if run.part is None else full_state_dict(optimizer, run.weights),
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
        "classes": _classes(run),
        "window": {
            "size": window.size,
            "done": window.done,
            "number": window.number,
            "scale": window.scale.clone() if waiting and window.scale is not None else None,
            "found": window.found.clone() if waiting and window.found is not None else None,
            "saved": {name: t.clone() for name, t in window.saved.items()} if waiting else {},
            "gradients": gradients,
        },
        "rng": rng_state(run.device) if run.part is None else {f"rank{run.part}": rng_state(run.device)},
        "policy": {"short": _short(run.policy), "text": run.policy.to_toml()},
    }
    if run.part is not None:
        state["fresh"] = not optimizer.state
    if rounding := run.weights.state_dict():
        state["rounding"] = rounding
    return {**state, CONTENTS: dict(_contents(_common(state)))}


def restore(run: Run, state: Any) -> None:
    """Check all of ``state`` against the run, then load it."""
    run.owner.look()
    _check_whole(state)
    _check_classes(run, state["classes"])
    _check_tensors("The model", run.owner.model.state_dict(), state["model"])
    if isinstance(run.owner.loss_fn, nn.Module):
        _check_tensors("The loss function", run.owner.loss_fn.state_dict(), state["loss_fn"])
    _check_tensors("The optimizer", run.owner.others(), state["others"])
    _check_optimizer(run.owner.optimizer, state["optimizer"])
    _check_window(run, state["window"])
    rng = _own_rng(run, state["rng"])
    _check_rng(rng)
    rounding = state.get("rounding", {})
    for numbers in rounding.values():
        _check_rng([numbers])
    optimizer = copy.deepcopy(state["optimizer"])  # torch would keep using the dictionary's own tensors
    if state.get("fresh"):
        optimizer["state"] = {}
    put_back = _Before(run)
    try:
        if run.scaler is not None:
            run.scaler.load_state_dict(state["scaler"])
        run.owner.optimizer.load_state_dict(optimizer)
        run.owner.model.load_state_dict(state["model"])
        if isinstance(run.owner.loss_fn, nn.Module):
            run.owner.loss_fn.load_state_dict(state["loss_fn"])
    except BaseException as error:
        put_back()
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(f"The checkpoint does not fit: {error} {_UNCHANGED}") from error
    with torch.no_grad():
        for name, tensor in run.owner.others().items():
            tensor.copy_(state["others"][name])
        run.weights.adopt(run.owner.optimizer, _saved_values(run, state))
        run.weights.load_state_dict(rounding)
    _load_window(run, state["window"])
    set_rng_state(rng, run.device)
    _compare_policies(run.policy, state.get("policy"))


def _compare_policies(own: Policy, saved: Mapping[str, str] | None) -> None:
    """Warn about a run that continues with other numerics. Checkpoints of older releases do not hold their policy."""
    if saved is None or saved["text"] == own.to_toml():
        return
    here, there = _short(own), saved["short"]
    what = f"{there} there, {here} here" if here != there else f"both {here}, but with other lists or rules"
    warnings.warn(
        f"The checkpoint and this step have different policies ({what}): the state is loaded, and the run continues "
        "with the numerics of this step. Compile the step with the policy of the checkpoint to continue bit for bit.",
        AmpWarning,
        stacklevel=users_frame(),
    )


def _short(policy: Policy) -> str:
    name = "Policy.torch" if policy.autocast_device is not None else f"level {policy.level}"
    return f"{name}, {dtype_name(policy.low)}"


class _Before:
    """The state before loading, to restore if loading fails half-way."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.scaler = None if run.scaler is None else run.scaler.state_dict()
        optimizer = run.owner.optimizer
        self.optimizer = (dict(optimizer.state), copy.deepcopy([_options(x) for x in optimizer.param_groups]))
        modules = [m for m in (run.owner.model, run.owner.loss_fn) if isinstance(m, nn.Module)]
        # the shapes have been compared, so copying cannot fail, but a module's own loading code can
        self.modules = [(m, _copy_of(m)) for m in modules if _loads_by_itself(m)]

    def __call__(self) -> None:
        run = self.run
        if run.scaler is not None and self.scaler is not None:
            run.scaler.load_state_dict(self.scaler)
        state, groups = self.optimizer
        run.owner.optimizer.state.clear()
        run.owner.optimizer.state.update(state)
        for group, options in zip(run.owner.optimizer.param_groups, groups, strict=True):
            group.update(options)
        with torch.no_grad():
            for module, values in self.modules:
                for key, own in module.state_dict().items():
                    if isinstance(own, Tensor):
                        own.copy_(values[key])


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _copy_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items() if isinstance(value, Tensor)}


def _loads_by_itself(module: nn.Module) -> bool:
    return any(loads_by_itself(m) for m in module.modules())


def _classes(run: Run) -> dict[str, str]:
    return {"optimizer": type(run.owner.optimizer).__name__, "scaler": type(run.scaler).__name__}


def _named(run: Run) -> dict[str, Tensor]:
    """Return every trained tensor by a name that is the same in another process."""
    trained = {id(p) for p in run.owner.parameters()}
    named = {**run.owner.named_parameters(), **run.owner.others()}
    return {name: p for name, p in named.items() if id(p) in trained}


def _saved_values(run: Run, state: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return what the checkpoint has for every parameter, by the id of the parameter here."""
    found = {id(p): state["others"][name] for name, p in run.owner.others().items()}
    for module, given in ((run.owner.model, state["model"]), (run.owner.loss_fn, state["loss_fn"])):
        if isinstance(module, nn.Module):
            found |= {id(p): given[key] for key, p in module.state_dict(keep_vars=True).items()}
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


# ------------------------------------------------------------------------------------------------ checks


def _contents(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, description) for every entry, including dictionaries and lists."""
    if isinstance(value, Mapping):
        yield path, f"dictionary of {len(value)}"
        for key, item in value.items():
            yield from _contents(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        yield path, f"list of {len(value)}"
        for number, item in enumerate(value):
            yield from _contents(item, f"{path}[{number}]")
    elif isinstance(value, Tensor):
        yield path, f"{dtype_name(value.dtype)}{list(value.shape)}"
    else:
        yield path, type(value).__name__


def _check_whole(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"A checkpoint of a training step is a dictionary, not a {type(state).__name__}: pass what "
            "step.state_dict() returned, after torch.load."
        )
    if not isinstance(state.get("format"), str) or state["format"] != FORMAT:
        looks = "a loss scaler's" if "growth_factor" in state else "a model's or an optimizer's"
        raise CheckpointError(
            f"This is not a checkpoint of a training step (its 'format' is missing or unknown); it may be {looks}: "
            "load it into that object instead."
        )
    if not isinstance(state.get("version"), int) or state["version"] != VERSION:
        raise CheckpointError(
            f"The checkpoint has version {state.get('version')!r}; this amp_compiler reads {VERSION}."
        )
    said = state.get(CONTENTS)
    found = dict(_contents(_common({key: value for key, value in state.items() if key != CONTENTS})))
    if not isinstance(said, Mapping):
        raise CheckpointError(f"The checkpoint is damaged: its table of contents is missing. {_UNCHANGED}")
    paths = dict.fromkeys((*said, *found))
    missing = [path for path in paths if path not in found or path not in said]
    for path in (*missing, *paths):
        if said.get(path) != found.get(path):
            raise CheckpointError(
                f"The checkpoint is damaged: {path or 'it'} should be {said.get(path, 'absent')}, but is "
                f"{found.get(path, 'missing')}. Use an earlier checkpoint. {_UNCHANGED}"
            )


def _check_classes(run: Run, given: Mapping[str, str]) -> None:
    for what, name in _classes(run).items():
        if given.get(what) != name:
            have, here = (("no scaler" if x == "NoneType" else x) for x in (given.get(what), name))
            raise CheckpointError(
                f"The checkpoint was made with {have} as {what}, but this step has {here}: compile the step with the "
                f"same. {_UNCHANGED}"
            )


def _check_tensors(what: str, own: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
    given = state or {}
    told = [f"it lacks {key}" for key in own if key not in given][:1]
    told += [f"it has {key}, which this run lacks" for key in given if key not in own][:1]
    for key, value in own.items():
        if not told and isinstance(value, Tensor):
            other = given[key]
            here, there = (f"{dtype_name(t.dtype)}{list(t.shape)}" for t in (value, other))
            rounds = value.shape == other.shape and {value.dtype, other.dtype} <= _ROUNDED
            told = [f"{key} is {there} there and {here} here"] * (here != there and not rounds)
    if told:
        raise CheckpointError(f"{what} of the checkpoint is a different one: {' and '.join(told)}. {_UNCHANGED}")


def _check_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    own, given = ([len(x["params"]) for x in groups] for groups in (optimizer.param_groups, state["param_groups"]))
    if own != given:
        raise CheckpointError(
            f"The checkpoint is of another optimizer: its groups have {given} parameters, those here {own}. "
            f"{_UNCHANGED}"
        )
    numbered = [i for group in state["param_groups"] for i in group["params"]]
    if numbered != list(range(len(numbered))) or not set(state["state"]) <= set(numbered):
        raise CheckpointError(f"The checkpoint is damaged: its optimizer's parameters are not numbered. {_UNCHANGED}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in zip(numbered, parameters, strict=True):
        for name, value in state["state"].get(index, {}).items():
            whole = isinstance(value, Tensor) and value.numel() == math.prod(parameter.shape) and value.dim() > 0
            if whole and value.shape != parameter.shape:
                raise CheckpointError(
                    f"The checkpoint is of another optimizer: {name} of parameter {index} has the shape "
                    f"{list(value.shape)}, the parameter {list(parameter.shape)}. {_UNCHANGED}"
                )


def _check_window(run: Run, state: Mapping[str, Any]) -> None:
    done, size, scale = state["done"], state["size"], state["scale"]
    if not 0 <= done < max(size, 1):
        raise CheckpointError(f"The checkpoint is damaged: {done} of {size} batches are waiting. {_UNCHANGED}")
    if done and size != run.window.size:
        raise CheckpointError(
            f"The checkpoint was made in the middle of an update of {size} batches, but this step has accumulate_steps="
            f"{run.window.size}: use the same number, or a checkpoint saved right after an update. {_UNCHANGED}"
        )
    if scale is not None and not 0 < float(scale) < math.inf:
        raise CheckpointError(f"The checkpoint is damaged: its scale is {float(scale)}. {_UNCHANGED}")
    named, buffers = _named(run), run.owner.buffers()
    for name, gradient in state["gradients"].items():
        if name not in named or gradient.shape != named[name].shape:
            raise CheckpointError(f"The checkpoint's gradient of {name} does not fit the model. {_UNCHANGED}")
    for name, value in state["saved"].items():
        rounds = name in buffers and {value.dtype, buffers[name].dtype} <= _ROUNDED
        dtype = buffers[name].dtype if rounds else value.dtype
        if name in buffers and (value.shape, dtype) != (buffers[name].shape, buffers[name].dtype):
            raise CheckpointError(f"The checkpoint's copy of {name} does not fit the model. {_UNCHANGED}")


def _common(state: Mapping[str, Any]) -> dict[str, Any]:
    """What all processes have alike: random generators that are saved by rank are not."""
    return {key: value for key, value in state.items() if key != "rng" or not isinstance(value, Mapping)}


def _own_rng(run: Run, states: Any) -> Any:
    """The states of this process, where they are saved by rank; those of another if it had none."""
    if not isinstance(states, Mapping):
        return states
    return states.get(f"rank{run.part or 0}", next(iter(states.values()), ()))


def _check_rng(states: Any) -> None:
    try:
        torch.Generator().set_state(states[0])
    except (TypeError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"The checkpoint's random generator cannot be set: {error}. {_UNCHANGED}") from error


def _load_window(run: Run, state: Mapping[str, Any]) -> None:
    window, device = run.window, run.device
    window.done, window.number = state["done"], state["number"]
    window.batches, window.held = [], {}
    own = run.owner.buffers()
    window.saved = {name: t.to(device, own.get(name, t).dtype, copy=True) for name, t in state["saved"].items()}
    window.widened = window.wide
    if window.done:
        window.scale = None if state["scale"] is None else state["scale"].to(device, copy=True)
        window.found = None if state["found"] is None else state["found"].to(device, copy=True)
        for name, parameter in _named(run).items():
            gradient = state["gradients"].get(name)
            if gradient is None:
                parameter.grad = None
            else:
                set_gradient(parameter, gradient.to(parameter.device, window.gradient_dtype(parameter), copy=True))
