"""Seconds of ``amp::cast_matmul`` on a GPU, beside a cast and the library's product: which of the two a product gets.

Both are rooflines. Ours is ``kernels/cast_matmul_estimate.py``, by which the kernel also chooses its configuration. The
library's product runs at the rate that was published for it. None of it was measured here.
"""

from __future__ import annotations

import torch

from ..kernels.cast_matmul_configs import target_of
from ..kernels.cast_matmul_estimate import FP32_BYTES, LOW_BYTES, RATES, TERA, Estimate, Shape, best
from ..kernels.gpu import uses_triton
from .device import Device
from .model import STREAMED, CostModel
from .products import Product
from .table import DEVICES

#: the device whose data sheet stands for a target of the Triton kernels
OF_TARGET = {"sm_80": "a100_80", "sm_86": "rtx3090", "sm_90": "h100_sxm", "sm_100": "b200", "gfx942": "mi300x"}
#: what Triton needs the sizes of rows to be multiples of, to load several elements at once
ALIGNED = 16


def target_here(device: torch.device) -> str | None:
    """The target of the Triton kernels that a device is; None if it does not run them."""
    return target_of(device) if device.type == "cuda" and uses_triton(device) else None


def sustained(target: str, unit: str) -> float:
    """The share of the data sheet's rate that large products reach: clocks are lower under load, for every kernel."""
    return RATES[target].multiplied * TERA / DEVICES[OF_TARGET[target]].peak[unit]


def fused_seconds(product: Product, target: str, wide: str, dtype: torch.dtype = torch.float16) -> float:
    """Seconds of our kernel, one of whose operands is fp32: ``wide`` is "left" or "right".

    >>> product = Product(16, 11008, 4096, aligned=(11008, 4096))
    >>> fused_seconds(product, "sm_80", "right") < library_seconds(product, "sm_80", 11008 * 4096)
    True
    """
    return fused_estimate(product, target, wide, dtype).seconds


def fused_estimate(product: Product, target: str, wide: str, dtype: torch.dtype = torch.float16) -> Estimate:
    """The estimate behind ``fused_seconds``, of the configuration that the kernel will choose."""
    return best(shape_of(product, wide, dtype), target, all(size % ALIGNED == 0 for size in product.aligned))


def shape_of(product: Product, wide: str, dtype: torch.dtype = torch.float16) -> Shape:
    """A product as the kernel's estimate takes it."""
    low = "bf16" if dtype is torch.bfloat16 else "fp16"
    return Shape(product.m, product.n, product.k, product.batch, wide, low)


def library_seconds(product: Product, target: str, cast: int, dtype: torch.dtype = torch.float16) -> float:
    """Seconds of the library's product of low operands, and of the cast of ``cast`` numbers to low precision before."""
    device = DEVICES[OF_TARGET[target]]
    unit = device.unit(dtype)
    moved = product.batch * (product.m * product.k + product.k * product.n + product.m * product.n) * LOW_BYTES
    computing = CostModel(device).product_seconds(product, unit, LOW_BYTES, sustained(target, unit))
    return max(computing, _moving(device, moved)) + device.launch + cast_seconds(target, cast)


def cast_seconds(target: str, numbers: int) -> float:
    """Seconds of a cast of fp32 numbers to low precision; 0 for none."""
    device = DEVICES[OF_TARGET[target]]
    return _moving(device, numbers * (FP32_BYTES + LOW_BYTES)) + device.launch if numbers else 0.0


def _moving(device: Device, size: int) -> float:
    return size / (device.bandwidth * STREAMED)
