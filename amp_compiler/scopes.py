"""Precision chosen inside a model's own code: ``precision(...)`` regions and ``set_precision`` on modules."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx
from torch import nn

from .errors import ArgumentError
from .policy import dtype_name, precision_dtype

ATTRIBUTE = "_amp_precision"

# A scope is marked in a captured graph by a node where it begins and one where it ends ("": the end). They stand in
# one row with the nodes of nested torch.autocast regions and carry the module stack of the code that opened them, so
# that ``normalize`` knows which is inside which; an annotation of the nodes between would not tell. The op is
# composite: a plain torch.compile, which knows nothing of us, decomposes it to nothing.
_LIBRARY = torch.library.Library("amp", "FRAGMENT")
_LIBRARY.define("scope(str precision) -> ()")
_LIBRARY.impl("scope", lambda precision: None, "CompositeImplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.amp.scope.default)


@contextlib.contextmanager
def precision(dtype: Any) -> Iterator[None]:
    """Run the ops inside in ``"float32"``, ``"float16"`` or ``"bfloat16"``, whatever the level says.

    A context manager and a decorator, for use inside a model's code; the innermost wins. Outside of a model that
    is being captured it does nothing.

    >>> with precision("float32"):
    ...     y = torch.ones(2) * 3
    """
    name = dtype_name(precision_dtype(dtype))
    if not torch.compiler.is_compiling():
        yield
        return
    torch.ops.amp.scope(name)
    try:
        yield
    finally:
        torch.ops.amp.scope("")


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


def marked_modules(modules: Mapping[str, nn.Module]) -> dict[str, torch.dtype]:
    """path -> dtype of each module that ``set_precision`` marked."""
    return {path: m.__dict__[ATTRIBUTE] for path, m in modules.items() if ATTRIBUTE in m.__dict__}


def modules_of(target: Any) -> dict[str, nn.Module]:
    """path -> module for all that a model, or a function that calls models, can call. A module with two names has
    two paths."""
    if isinstance(target, nn.Module):
        return dict(target.named_modules(remove_duplicate=False))
    owner = getattr(target, "__self__", None)
    if isinstance(owner, nn.Module):
        return modules_of(owner)
    found: dict[str, nn.Module] = {}
    if inspect.isfunction(target):
        seen = inspect.getclosurevars(target)
        for name, value in (*seen.globals.items(), *seen.nonlocals.items()):
            if isinstance(value, nn.Module):
                found.update({f"{name}.{path}".rstrip("."): m for path, m in modules_of(value).items()})
    return found
