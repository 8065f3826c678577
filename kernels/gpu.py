"""Decide whether a GPU runs our Triton kernels: Triton is installed, the GPU has tensor cores that it can use, and
``AMP_GPU_KERNELS=torch`` isn't set. Nothing here imports Triton.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

SETTING = "AMP_GPU_KERNELS"
AUTOTUNE = "AMP_CUDA_AUTOTUNE"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what the kernels read


def setting() -> str:
    """Return what ``AMP_GPU_KERNELS`` asks for, "triton" or "torch"; unset and empty mean "triton"."""
    asked = os.environ.get(SETTING) or "triton"
    if asked not in ("triton", "torch"):
        raise ValueError(f"{SETTING}={asked!r} is not one of: triton, torch.")
    return asked


def autotunes() -> bool:
    """True if ``AMP_CUDA_AUTOTUNE=1`` asks to time all configurations of the matrix product once per shape; unset,
    empty and ``0`` are False."""
    asked = os.environ.get(AUTOTUNE) or "0"
    if asked not in ("0", "1"):
        raise ValueError(f"{AUTOTUNE}={asked!r} is not one of: 0, 1.")
    return asked == "1"


def uses_triton(device: torch.device) -> bool:
    """True if tensors on this device use the Triton kernels."""
    return device.type == "cuda" and setting() == "triton" and _can(device.index or 0)


@functools.cache
def _can(index: int) -> bool:
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)
