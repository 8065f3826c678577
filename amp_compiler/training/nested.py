"""Tensors in nested tuples, lists and dicts, as a loss scaler takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from ..common.errors import ArgumentError


def map_tensors(value: Any, function: Callable[[Tensor], Tensor], method: str) -> Any:
    """Return the structure with ``function`` applied to each tensor; iterables other than lists, tuples and dicts
    become lists.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function, method) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function, method) for item in value))
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        items = [map_tensors(item, function, method) for item in value]
        return type(value)(items) if isinstance(value, list | tuple) else items
    if value is None and method == "unscale":
        return None
    raise ArgumentError(
        f"{method}() takes a tensor, or tuples, lists and dicts of tensors, not {type(value).__name__}: {value!r}."
    )


def tensors_in(value: Any, method: str) -> list[Tensor]:
    """Return all tensors of the structure, in order."""
    leaves: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        leaves.append(tensor)
        return tensor

    map_tensors(value, keep, method)
    return leaves
