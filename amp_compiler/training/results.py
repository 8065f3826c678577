"""The result of one call of a training step, and how the loss is found in what the user's code returned.

``split`` runs inside the captured function, so it is Python that Dynamo can trace. What came with the loss and the
model's output leave the graph as values; where the step runs in pieces, ``detached`` detaches them from autograd.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..common.errors import ArgumentError
from ..common.torch_names import pytree
from ..policy import dtype_name


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one call of a training step, as tensors on the model's device. Making it needs no host sync.

    Args:
        loss: The loss of this batch, not scaled.
        skipped: True if this call should have updated the weights but did not, because a gradient was not finite.
        scale: What the loss was multiplied by.
        grad_norm: The norm of all gradients of this update so far, unscaled and before clipping.
        updated: True if this call updated the weights. Use it to step a learning-rate scheduler.
        loss_finite: False if the loss is inf or NaN. That alone skips nothing: if the gradients are finite, the weights
            are updated, and a warning is given.
        extra: What came with the loss: ``metrics`` of ``(loss, metrics)``, the other entries of a dict with ``"loss"``.
            None if nothing did, and for an object with ``.loss`` that the model itself returned.
        output: The model's output, with ``return_output=True``. Like ``extra`` it is detached, has the dtypes that the
            fp32 model would give it, and is None in the result of ``flush()``.

    Examples:
        >>> import torch
        >>> from amp_compiler import compile_train_step
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = compile_train_step(model, lambda y, t: ((y - t).square().mean(), {"mean": y.mean()}), optimizer)
        >>> result = step(torch.ones(3, 4), torch.zeros(3, 1))
        >>> bool(result.updated), bool(result.loss_finite), sorted(result.extra)
        (True, True, ['mean'])
    """

    loss: Tensor
    skipped: Tensor
    scale: Tensor
    grad_norm: Tensor
    updated: Tensor
    loss_finite: Tensor
    extra: Any = None
    output: Any = None


class Answer(NamedTuple):
    """What the captured function of a training step returns for one batch."""

    loss: Any
    extra: Any
    output: Any


# ------------------------------------------------------------------------------------- inside the captured function


def split(answer: Any, *, from_model: bool) -> tuple[Any, Any]:
    """Split what a loss function or a model returned into (the loss, the rest).

    ``from_model``: the model itself returned it. Of an object such as the models of transformers return, only the loss
    is taken: returning its logits and caches too would cost memory and casts. ``return_output=True`` asks for them.
    """
    if isinstance(answer, torch.Tensor):
        return answer, None
    if from_model and type(answer) not in (dict, OrderedDict, tuple, list) and hasattr(answer, "__dataclass_fields__"):
        return getattr(answer, "loss", answer), None
    names = _names(answer)
    if names is not None:
        values = {name: answer[name] if isinstance(answer, Mapping) else getattr(answer, name) for name in names}
        return values.pop("loss"), values
    if hasattr(answer, "loss"):
        return answer.loss, None
    if isinstance(answer, (tuple, list)) and len(answer) > 0 and isinstance(answer[0], torch.Tensor):
        rest = answer[1:]
        return answer[0], None if len(rest) == 0 else rest[0] if len(rest) == 1 else tuple(rest)
    return answer, None


def marked(loss: Any) -> Any:
    """Return the loss, marked as such in the graph. It is in this module because ``torch`` is a global of both this one
    and the captured function's: Dynamo would guard, in Python and at each call, that the two are the same."""
    return torch.ops.amp.loss(loss) if isinstance(loss, torch.Tensor) else loss


def _names(answer: Any) -> list[str] | None:
    """Return the names of the entries of a dict, dataclass or named tuple that has a ``loss``; None for others."""
    if isinstance(answer, Mapping):
        names = list(answer.keys())
    elif isinstance(answer, tuple):
        names = list(getattr(answer, "_fields", ()))
    else:
        names = list(getattr(answer, "__dataclass_fields__", ()))
    return names if "loss" in names else None


# ------------------------------------------------------------------------------------------------- as values


def detached(value: Any, low: torch.dtype | None = None) -> Any:
    """Return the same structure with every tensor detached. Objects of other classes are copied, so that the user's
    own are not changed; modules are left alone.

    ``low``: tensors of this dtype become fp32, for ``Policy.torch``, where graphs return the dtypes of autocast.
    """
    return _detached(value, low, {})


def _detached(value: Any, low: torch.dtype | None, seen: dict[int, Any]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return value.detach().float() if value.dtype is low else value.detach()
    if id(value) in seen:
        return seen[id(value)]
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda v: v is not value)
    if not (spec.is_leaf() or (leaves and leaves[0] is value)):
        return pytree.tree_unflatten([_detached(leaf, low, seen) for leaf in leaves], spec)
    if isinstance(value, (nn.Module, type)) or callable(value):
        return value
    own = dict(getattr(value, "__dict__", {}))
    if is_dataclass(value):  # it may have slots instead of a __dict__
        own |= {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    if not own:
        return value
    twin = seen[id(value)] = copy.copy(value)
    for name, item in own.items():
        object.__setattr__(twin, name, _detached(item, low, seen))  # also where the class is frozen
    return twin


# ---------------------------------------------------------------------------------------------------- checks


def check_loss_fn(loss_fn: Any) -> None:
    """Raise unless ``loss_fn`` can be called with the model's output and the targets."""
    if loss_fn is None:
        return
    if not callable(loss_fn):
        raise ArgumentError(f"loss_fn must be a function of (output, targets) or None, not {loss_fn!r}.")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise ArgumentError(f"loss_fn is the class {loss_fn.__name__}: pass an instance, {loss_fn.__name__}().")
    try:
        signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):
        return  # a builtin without a signature
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ArgumentError(
            f"loss_fn is called as loss_fn(output, targets), but {place(loss_fn)} takes {signature}: {error}. Wrap it, "
            f"as in lambda output, targets: {_name(loss_fn)}(...). If the model returns the loss itself, pass "
            "loss_fn=None."
        ) from None


def check_loss(loss: Any, loss_fn: Any) -> None:
    """Raise unless the loss is a floating point tensor with one element."""
    source = "the model returns" if loss_fn is None else f"{place(loss_fn)} gives"
    if not isinstance(loss, Tensor):
        raise ArgumentError(
            f"The loss must be a scalar tensor, but {source} a {type(loss).__name__}: return the loss, (loss, "
            'anything), a dict with "loss" or an object with .loss.'
        )
    if not loss.is_floating_point():
        raise ArgumentError(
            f"The loss must be a float, but {source} {dtype_name(loss.dtype)}, which has no gradient. Compute it from "
            "the model's output in floating point."
        )
    if loss.numel() != 1:
        how = "pass a loss_fn(output, targets)" if loss_fn is None else "take its mean or sum in loss_fn"
        raise ArgumentError(f"The loss must be a scalar, but {source} one of the shape {list(loss.shape)}: {how}.")


def place(function: Callable[..., Any]) -> str:
    """Return a function's name and source line, as far as they are known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{_name(function)}{where}"


def _name(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return "loss_fn" if name == "<lambda>" else name
