"""Promote operands of two float dtypes where torch refuses them, without a cast in the graph.

A graph that is traced in low precision (``twin.py``) holds tensors that the code itself created in fp32, and some ops
have no low-precision kernel. Such code runs under autocast, but could not be traced as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)

from .. import ir
from ..common.torch_names import pytree


def promoting(call: Callable[[Any, Any], Any], args: Any, kwargs: Any, in_place: bool, alike: Any = None) -> Any:
    """Call an op; if torch refuses it in low precision or for mixed dtypes, call it again with one dtype for all.

    In the twin a parameter is low and tensors that the code created may be fp32, and some ops (fft, linalg) have no
    low-precision kernel: a model that runs under autocast need not run in pure low precision. ``alike(tensor, dtype)``
    converts one operand.
    """
    try:
        return call(args, kwargs)
    except (RuntimeError, TypeError):
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        floats = [t for t in tensors if t.dtype in ir.ELIGIBLE]
        if not any(t.dtype in ir.LOW_DTYPES for t in floats) or (in_place and len({t.dtype for t in floats}) < 2):
            raise
        dtype = floats[0].dtype if in_place else torch.float32
        convert = alike or (lambda t, d: t.to(d))

        def change(value: torch.Tensor) -> torch.Tensor:
            return convert(value, dtype) if value.dtype in ir.ELIGIBLE and value.dtype != dtype else value

        return call(*pytree.tree_map_only(torch.Tensor, change, (args, kwargs)))


def converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` in another dtype; to the tracer it is still the same value."""
    mode = get_proxy_mode()
    if mode is None:
        return value.to(dtype)
    proxy = get_proxy_slot(value, mode.tracer, None)
    with disable_proxy_modes_tracing():
        new = value.to(dtype)
    if proxy is not None:
        set_proxy_slot(new, mode.tracer, proxy)
    return new
