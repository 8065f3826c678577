"""Dtypes as users write them, and the names that users read."""

from __future__ import annotations

from typing import Any

import torch

from ..common.errors import ArgumentError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}


def precision_dtype(given: object) -> torch.dtype:
    """Return the dtype that ``"float32"``, ``"bf16"`` or ``torch.float16`` names."""
    if isinstance(given, torch.dtype) and given in DTYPES.values():
        return given
    if isinstance(given, str):
        name = given.lower().removeprefix("torch.")
        name = _SHORT.get(name, name)
        if name in DTYPES:
            return DTYPES[name]
    raise ArgumentError(f"Unknown precision {given!r}: choose 'float32', 'float16' or 'bfloat16'.")


def check_low_dtype(given: object) -> torch.dtype:
    """Return the low-precision dtype, fp16 or bf16; raise for anything else."""
    try:
        dtype = precision_dtype(given)
    except ArgumentError:
        dtype = torch.float32
    if dtype is torch.float32:
        raise ArgumentError(
            f"dtype must be torch.float16 or torch.bfloat16, not {given!r}. For plain fp32 use level='O0'."
        )
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def default_dtype(device: Any) -> torch.dtype:
    """Return torch.autocast's default: fp16 on CUDA, bf16 elsewhere."""
    kind = device.type if isinstance(device, torch.device) else str(device).split(":")[0]
    return torch.float16 if kind == "cuda" else torch.bfloat16
