"""Call ops on operands of two float dtypes where torch refuses them, with one dtype for all.

A graph that is run or traced in low precision holds tensors that the code itself created in fp32, and some ops have no
low-precision kernel. Such code runs under autocast, but could not be traced as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..common.torch_names import pytree
from .values import ELIGIBLE, LOW_DTYPES


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
        floats = [t for t in tensors if t.dtype in ELIGIBLE]
        if not any(t.dtype in LOW_DTYPES for t in floats) or (in_place and len({t.dtype for t in floats}) < 2):
            raise
        dtype = floats[0].dtype if in_place else torch.float32
        convert = alike or (lambda t, d: t.to(d))

        def change(value: torch.Tensor) -> torch.Tensor:
            return convert(value, dtype) if value.dtype in ELIGIBLE and value.dtype != dtype else value

        return call(*pytree.tree_map_only(torch.Tensor, change, (args, kwargs)))
