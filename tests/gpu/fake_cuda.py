"""Tensors of device ``cuda`` on a machine without one: fakes, which go through torch's real dispatcher.

torch 2.13, CPU build: a fake of device ``cuda`` can be made and computed with, and AutocastCUDA runs on it, but the
context manager ``torch.autocast("cuda")`` refuses, so its switches are set one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree


def on_cuda(mode: FakeTensorMode, values: Any) -> Any:
    """The same values as fakes on device ``cuda``; one fake for each tensor."""
    made: dict[int, Tensor] = {}

    def fake(value: Tensor) -> Tensor:
        if id(value) not in made:
            with mode:
                made[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        return made[id(value)]

    return pytree.tree_map_only(Tensor, fake, values)


@contextlib.contextmanager
def autocast_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Inside, ops on device ``cuda`` run as under ``torch.autocast("cuda", dtype)``."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(before[2])
        torch.clear_autocast_cache()


def autocast_dtypes(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> list[torch.dtype]:
    """The dtypes of all tensors that an op returns under autocast on device ``cuda``."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given, named = on_cuda(mode, (args, dict(kwargs)))
    if "device" in named:
        named["device"] = "cuda"
    with autocast_cuda(dtype), mode, torch.no_grad():
        result = op(*given, **named)
    return [value.dtype for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
