"""Arguments that ``amp_compile``, ``compile_train_step`` and ``convert_model`` share, checked in one place."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..common import logs
from ..common.errors import AmpError, ArgumentError, PolicyError
from ..common.messages import nearest_path
from ..common.torch_names import inside_ddp
from ..cost.device import Device
from ..cost.devices import find
from ..ir.nesting import check_parts
from ..kernels import capability, cpu, gpu
from ..passes import order
from ..policy import DEFAULT_LEVEL, Policy, check_level, check_low_dtype, default_dtype, matches
from ..policy.ops.names import OpLike
from ..policy.scopes import modules_of
from ..rewrite.verify import deep_by_default
from .options import BACKENDS


@dataclass(frozen=True)
class Request:
    """What a user asked for, checked as far as it can be without a model."""

    policy: Policy
    dtype: torch.dtype | None
    exclude: tuple[str | type[nn.Module], ...]
    backend: str
    disable_passes: tuple[str, ...]
    device: Device | None = None

    def policy_for(self, model: Any) -> Policy:
        """Return the policy with its low-precision dtype chosen and its module rules resolved in the model."""
        policy = _with_excluded(_with_dtype(self.policy, self.dtype, model), model, self.exclude)
        check_parts(policy, modules_of(model))
        return policy


def check_request(
    level: str, dtype: Any, policy: Any, white_list: Iterable[OpLike], black_list: Iterable[OpLike],
    exclude: Iterable[str | type[nn.Module]], backend: str, disable_passes: Iterable[str],
    device: str | os.PathLike[str] | Device | None = None,
) -> Request:  # fmt: skip
    """Check the arguments that decide on precision; raise an error that says what to write instead."""
    if backend not in BACKENDS:
        raise ArgumentError(f"Unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}.")
    check_environment()
    check_level(level)
    if dtype is not None:
        dtype = check_low_dtype(dtype)
    if policy is not None and not isinstance(policy, Policy):
        raise ArgumentError(f"policy must be an amp_compiler.Policy, not {type(policy).__name__}.")
    if policy is not None and level not in (DEFAULT_LEVEL, policy.level):
        raise ArgumentError(f"level={level!r} contradicts the policy's {policy.level!r}: pass only one of them.")
    names = tuple(order.check_names(disable_passes))
    base = (policy or Policy(level, dtype)).with_ops(low=white_list, fp32=black_list)
    return Request(base, dtype, tuple(_exclusions(exclude)), backend, names, check_device(device, base))


def check_device(device: str | os.PathLike[str] | Device | None, policy: Policy) -> Device | None:
    """The device whose costs decide. Only level "auto" asks them; elsewhere the argument would have no effect."""
    if device is None:
        return None
    found = find(device)
    if policy.autocast_device is not None or policy.level != "auto":
        level = f"level {policy.level!r}" if policy.autocast_device is None else "Policy.torch"
        raise ArgumentError(
            f"device={device!r} has no effect with {level}: it says what to run in low precision without costs.",
            hint='Use level="auto" with device=, or leave device out.',
        )
    return found


def check_environment() -> None:
    """Check the environment variables: a misspelt one that is only found inside a pass would look like a bug of that
    pass."""
    reads = (cpu.setting, gpu.setting, gpu.autotunes, capability.chosen, deep_by_default, logs.check)
    try:
        for read in reads:
            read()
    except ValueError as error:
        raise ArgumentError(f"An environment variable is wrong: {error} Correct it, or unset it.") from None


def _with_dtype(policy: Policy, dtype: torch.dtype | None, model: Any) -> Policy:
    if dtype is not None and policy.dtype not in (None, dtype):
        raise ArgumentError(f"dtype={dtype} contradicts the policy's {policy.dtype}: pass only one of them.")
    return dataclasses.replace(policy, dtype=policy.dtype or dtype or default_dtype(_device(model)))


def _device(model: Any) -> str:
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def _exclusions(exclude: Iterable[str | type[nn.Module]]) -> list[str | type[nn.Module]]:
    if isinstance(exclude, (str, type)) or not isinstance(exclude, Iterable):
        raise ArgumentError(f"exclude must be a list of path patterns and module classes: write [{exclude!r}].")
    given = list(exclude)
    for item in given:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ArgumentError(f"exclude takes path patterns and module classes, not {item!r}.")
    return given


def _with_excluded(policy: Policy, model: Any, exclude: tuple[str | type[nn.Module], ...]) -> Policy:
    if not isinstance(model, nn.Module):
        if exclude or policy.modules or any(rule.module for rule in policy.calls):
            raise PolicyError("exclude and module rules need a torch.nn.Module: a function has no module paths.")
        return policy
    modules = modules_of(model)
    first: dict[int, str] = {}
    for path, module in modules.items():
        first.setdefault(id(module), path)  # the name that graphs use for a module with two names
    rules: dict[str, str] = {}
    for item in exclude:
        if isinstance(item, str):
            named = [path for path in modules if matches(item, path)]
            found = [item] if named else []
            found += [p for path in named if (p := first[id(modules[path])]) and not matches(item, p)]
        else:
            found = [path or "*" for path, module in modules.items() if isinstance(module, item)]
        if not found:
            raise _no_match(item, modules)
        rules.update(dict.fromkeys(found, "float32"))
    for pattern, precision in policy.modules:
        named = [path for path in modules if matches(pattern, path)]
        if not named:
            raise _no_match(pattern, modules)
        others = [p for path in named if (p := first[id(modules[path])]) and not matches(pattern, p)]
        if inside_ddp(model) is not None:
            rules.update(dict.fromkeys(others, precision))
    for rule in policy.calls:
        if rule.module not in modules:
            message = f"The call rule '{rule}' names the module {rule.module!r}, which the model does not have."
            raise PolicyError(message, hint=nearest_path(rule.module, modules))
    return policy.with_modules(rules) if rules else policy


def _no_match(item: Any, modules: Iterable[str]) -> PolicyError:
    if isinstance(item, type):
        return PolicyError(f"exclude: the model has no module of class {item.__name__}.")
    message = f"The module pattern {item!r} matches no module of the model."
    return PolicyError(message, hint=nearest_path(item, modules))


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) for the ``inputs`` of a step or a report, which are a tensor, a tuple of arguments or a
    dict of keyword arguments."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        if not all(isinstance(key, str) for key in inputs):
            raise ArgumentError("inputs as a dict are the model's keyword arguments: its keys must be names.")
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def split_batch(batch: Any, number: int, error: type[AmpError] = ArgumentError) -> tuple[Any, Any]:
    """Return (inputs, targets) of a batch that a loader gave: a pair, or inputs alone. ``number``: for the error."""
    if not isinstance(batch, (tuple, list)):
        return batch, None
    if not 1 <= len(batch) <= 2:
        raise error(
            f"Batch {number} has {len(batch)} parts: a batch is (inputs, targets), with a tuple of several inputs as "
            "((x, mask), targets)."
        )
    return (batch[0], batch[1]) if len(batch) == 2 else (batch[0], None)
