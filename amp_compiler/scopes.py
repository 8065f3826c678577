"""Precision chosen inside a model's own code: ``precision(...)`` regions and ``set_precision`` on modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .errors import ArgumentError
from .policy import dtype_name, precision_dtype

ATTRIBUTE = "_amp_precision"


@contextlib.contextmanager
def precision(dtype: Any) -> Iterator[None]:
    """Run the ops inside in ``"float32"``, ``"float16"`` or ``"bfloat16"``, whatever the level says.

    A context manager and a decorator, for use inside a model's code; the innermost wins. It is a generator
    over ``fx.traceback.annotate`` because Dynamo (torch 2.13) does not trace a class with ``__enter__`` here.
    Outside of a compiled model it does nothing.

    >>> with precision("float32"):
    ...     y = torch.ones(2) * 3
    """
    import torch.fx.traceback

    name = dtype_name(precision_dtype(dtype))
    with torch.fx.traceback.annotate({"amp_precision": name}):
        yield


def set_precision(module: nn.Module, dtype: Any) -> nn.Module:
    """Mark a module, and all below it, to run in ``dtype``; ``None`` takes the mark off. Returns the module.

    It acts on graphs captured afterwards: mark before the first call of the compiled model.

    >>> layer = set_precision(nn.Linear(2, 2), "float32")
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"set_precision takes a torch.nn.Module, not {type(module).__name__}.")
    if dtype is None:
        module.__dict__.pop(ATTRIBUTE, None)
    else:
        module.__dict__[ATTRIBUTE] = precision_dtype(dtype)
    return module


def marked_modules(model: nn.Module) -> dict[str, torch.dtype]:
    """path -> dtype of each module that ``set_precision`` marked."""
    return {name: m.__dict__[ATTRIBUTE] for name, m in model.named_modules() if ATTRIBUTE in m.__dict__}
