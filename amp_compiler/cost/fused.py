"""Seconds of ``amp::cast_matmul`` on a GPU, beside a cast and the library's product: which of the two a product gets.

Both are rooflines, from a device's data sheet. Ours has the tiles of the configuration that is chosen for the shape,
loads fp32 operands at twice the bytes, and converts each number that it loads; the same warps convert and multiply, so
that adds up. None of it was measured.
"""

from __future__ import annotations

from math import ceil

import torch

from ..kernels.cast_matmul_configs import choose, target_of
from ..kernels.gpu import uses_triton
from .device import Device
from .model import CACHE, STREAMED, SUSTAINED, CostModel
from .products import Product
from .table import DEVICES

#: the device whose data sheet stands for a target of the Triton kernels
OF_TARGET = {"sm_80": "a100_80", "sm_86": "rtx3090", "sm_90": "h100_sxm", "sm_100": "b200", "gfx942": "mi300x"}
#: conversions that a multiprocessor does in the time of one fp32 operation of all its lanes (CUDA's programming guide:
#: 64 per clock, of 128 multiplications and additions), two numbers each
CONVERTED = 64 / 128 * 2
LOW_BYTES, FP32_BYTES = 2, 4


def target_here(device: torch.device) -> str | None:
    """The target of the Triton kernels that a device is; None if it does not run them."""
    return target_of(device) if device.type == "cuda" and uses_triton(device) else None


def fused_seconds(product: Product, target: str, wide: str, dtype: torch.dtype = torch.float16) -> float:
    """Seconds of our kernel, one of whose operands is fp32: ``wide`` is "left" or "right".

    >>> product = Product(8192, 768, 768, aligned=(768, 768))
    >>> fused_seconds(product, "sm_80", "right") < library_seconds(product, "sm_80", 768 * 768)
    True
    """
    device = DEVICES[OF_TARGET[target]]
    config, pieces = choose(product.m, product.n, product.k, target, product.batch)
    rows, columns = config.block_m, config.block_n
    terms = ceil(product.k / pieces)
    waves = ceil(product.batch * ceil(product.m / rows) * ceil(product.n / columns) * pieces / device.sms)
    left, right = (FP32_BYTES if wide == side else LOW_BYTES for side in ("left", "right"))
    unit = device.unit(dtype)
    multiplying = 2 * rows * columns * terms / (device.peak[unit] * SUSTAINED[unit] / device.sms)
    converting = (rows if wide == "left" else columns) * terms / (device.peak["fp32"] / 2 * CONVERTED / device.sms)
    loading = (rows * left + columns * right) * terms / (device.bandwidth * CACHE / device.sms)
    sums = 2 * pieces * product.m * product.n * FP32_BYTES * product.batch if pieces > 1 else 0
    moved = product.batch * (product.m * product.k * left + product.k * product.n * right
                             + product.m * product.n * LOW_BYTES) + sums  # fmt: skip
    launches = device.launch * (2 if pieces > 1 else 1)
    return max(waves * max(multiplying + converting, loading), moved / (device.bandwidth * STREAMED)) + launches


def library_seconds(product: Product, target: str, cast: int, dtype: torch.dtype = torch.float16) -> float:
    """Seconds of the library's product of low operands, and of the cast of ``cast`` numbers to low precision before."""
    device = DEVICES[OF_TARGET[target]]
    moved = product.batch * (product.m * product.k + product.k * product.n + product.m * product.n) * LOW_BYTES
    computing = CostModel(device).product_seconds(product, device.unit(dtype), LOW_BYTES)
    return max(computing, _moving(device, moved)) + device.launch + cast_seconds(target, cast)


def cast_seconds(target: str, numbers: int) -> float:
    """Seconds of a cast of fp32 numbers to low precision; 0 for none."""
    device = DEVICES[OF_TARGET[target]]
    return _moving(device, numbers * (FP32_BYTES + LOW_BYTES)) + device.launch if numbers else 0.0


def _moving(device: Device, size: int) -> float:
    return size / (device.bandwidth * STREAMED)
