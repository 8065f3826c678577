"""Say why a model does not take a batch: which input, what it is, and what was expected.

The error of a failed capture is about fake tensors and graph nodes. The model itself is called once more instead, and
its own error is put together with the inputs and with the module that refused them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..common.errors import CalibrationError
from ..common.messages import first_line, raised_at
from ..common.torch_names import pytree
from ..policy import dtype_name

#: layers that take one shape only -> that shape, in words
_EXPECTED: tuple[tuple[tuple[type[nn.Module], ...], Callable[[Any], str]], ...] = (
    ((nn.Linear,), lambda m: f"[..., {m.in_features}]"),
    ((nn.Conv1d,), lambda m: f"[N, {m.in_channels}, L]"),
    ((nn.Conv2d,), lambda m: f"[N, {m.in_channels}, H, W]"),
    ((nn.Conv3d,), lambda m: f"[N, {m.in_channels}, D, H, W]"),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), lambda m: f"[N, {m.num_features}, ...]"),
    ((nn.GroupNorm,), lambda m: f"[N, {m.num_channels}, ...]"),
    ((nn.LayerNorm,), lambda m: f"[..., {', '.join(map(str, m.normalized_shape))}]"),
    ((nn.RNN, nn.LSTM, nn.GRU), lambda m: f"[..., {m.input_size}]"),
)
_LONGEST = 120  # characters of a module's text


def kinds(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> dtype and shape of the inputs, by the names of the model's arguments.

    >>> kinds(torch.nn.Linear(2, 2), (torch.ones(3, 2),), {})
    {'input': 'float32[3, 2]'}
    """
    try:
        bound = _signature(model).bind(*args, **kwargs)
        named = bound.arguments.items()
    except (TypeError, ValueError):
        named = {**{f"argument {place}": value for place, value in enumerate(args, 1)}, **kwargs}.items()
    found = {}
    for name, value in named:
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            found[name + pytree.keystr(path)] = kind(leaf)
    return found


def kind(value: Any) -> str:
    """Return the dtype and the shape of a value; of one that is not a tensor, its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{dtype_name(value.dtype)}{list(value.shape)}"


def refusal(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int, known: Mapping[str, str], where: str
) -> CalibrationError | None:
    """Call the model with a batch, without capturing it. Return the error that says why it does not take the batch, or
    None if it does.

    ``number``: of the batch. ``known``: the ``kinds`` of inputs that the model takes, empty if there are none;
    ``where``: which inputs these are.
    """
    given = kinds(model, args, kwargs)
    start = f"The model cannot be called with batch {number}: "
    if (wrong := _wrong_arguments(model, args, kwargs)) is not None:
        return CalibrationError(f"{start}{wrong}")
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, dict(kwargs)))
    try:
        with torch.no_grad(), _inside() as stack:
            model(*args, **kwargs)
    except Exception as error:  # the user's code may raise anything
        inner = _inner(model, stack[-1]) if stack else ""
        text = f"{start}{_compared(given, known, where)}. {inner}{first_line(error, named=True)}{raised_at(error)}"
        made = CalibrationError(text)
        made.__cause__ = error
        return made
    return None


def loss_refusal(
    model: Any, loss_fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, number: int
) -> CalibrationError | None:
    """The same for the loss: call it with the output of the model and the targets."""
    args, kwargs, targets = pytree.tree_map_only(Tensor, torch.clone, (args, dict(kwargs), targets))
    try:
        with torch.no_grad():
            loss_fn(model(*args, **kwargs), targets)
    except Exception as error:  # the user's code may raise anything
        given = f"the targets are {kind(targets)}" if targets is not None else "the batch has no targets"
        text = f"loss_fn cannot be called with batch {number}: {given}. {first_line(error, named=True)}"
        made = CalibrationError(text + raised_at(error))
        made.__cause__ = error
        return made
    return None


def _signature(model: Any) -> inspect.Signature:
    return inspect.signature(model.forward if isinstance(model, nn.Module) else model)


def _wrong_arguments(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the number or the names of the arguments, or None."""
    try:
        signature = _signature(model)
    except (TypeError, ValueError):  # a builtin
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join(f"{name} {text}" for name, text in kinds(model, args, kwargs).items()) or "nothing"
        name = f"{type(model).__name__}.forward" if isinstance(model, nn.Module) else getattr(model, "__name__", "it")
        return (f"it is {name}({', '.join(signature.parameters)}), and the batch gives {given} ({error}). A batch is "
                "(inputs, targets): several inputs are a tuple, ((a, b), targets), or a dict by name.")  # fmt: skip
    return None


def _compared(given: Mapping[str, str], known: Mapping[str, str], where: str) -> str:
    """Return what the inputs are; where some are known, those that differ from them."""
    differ = {name: text for name, text in given.items() if known.get(name) not in (None, text)}
    if differ:
        return ", ".join(f"{name} is {text}, but {known[name]} {where}" for name, text in differ.items())
    return ", ".join(f"{name} is {text}" for name, text in given.items())


@contextlib.contextmanager
def _inside() -> Iterator[list[tuple[nn.Module, Any]]]:
    """Yield the modules that are running, the innermost last, each with its positional arguments."""
    stack: list[tuple[nn.Module, Any]] = []
    enter = register_module_forward_pre_hook(lambda module, given: stack.append((module, given)))
    leave = register_module_forward_hook(lambda module, given, result: stack.pop() and None)
    try:
        yield stack
    finally:
        enter.remove()
        leave.remove()


def _inner(model: Any, last: tuple[nn.Module, Any]) -> str:
    """Return which module refused which values."""
    module, given = last
    if module is model and not any(isinstance(module, kind_) for kinds_, _ in _EXPECTED for kind_ in kinds_):
        return ""
    path = next((path for path, m in model.named_modules() if m is module), "")
    name = f"{path} ({type(module).__name__})" if path else type(module).__name__
    values = ", ".join(kind(v) for v in pytree.tree_leaves(given)) or "nothing"
    for classes, shape in _EXPECTED:
        if isinstance(module, classes):
            weight = next((p for p in module.parameters()), None)
            dtype = dtype_name(weight.dtype) if weight is not None and weight.is_floating_point() else ""
            return f"{name} expects {dtype}{shape(module)} and is given {values}: "
    text = " ".join(repr(module).split())
    return f"{name}, {text if len(text) <= _LONGEST else text[:_LONGEST] + '…'}, is given {values}: "
