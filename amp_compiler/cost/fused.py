"""Seconds of ``amp::cast_matmul`` on a GPU, beside a cast and the library's product: which of the two a product gets.

Both are rooflines. Ours is made of figures of the compiled kernel (``kernels/cast_matmul_figures.py``): how many
programs a processor runs at once, and what one step of the loop issues, converts, and moves through shared memory and
from memory. The library's product runs at the rate that was published for it. None of it was measured here.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch

from ..kernels.cast_matmul_configs import Config, choose, target_of
from ..kernels.cast_matmul_figures import FIGURES
from ..kernels.gpu import uses_triton
from .device import TERA, Device
from .model import CACHE, STREAMED, SUSTAINED, CostModel
from .products import Product
from .table import DEVICES


class Processor(NamedTuple):
    """What a multiprocessor or compute unit does in one clock, from CUDA's programming guide and AMD's manuals."""

    lanes: int  # multiplications and additions in fp32; with the data sheet's rate they tell the clock
    issued: float  # instructions of a warp (AMD: of a vector unit, of which there are four and each takes four clocks)
    converted: float  # of these, conversions to low precision
    shared: int = 128  # bytes of shared memory


#: the device whose data sheet stands for a target of the Triton kernels
OF_TARGET = {"sm_80": "a100_80", "sm_86": "rtx3090", "sm_90": "h100_sxm", "sm_100": "b200", "gfx942": "mi300x"}
PROCESSORS = {"sm_80": Processor(64, 4, 2), "sm_86": Processor(128, 4, 2), "sm_90": Processor(128, 4, 2),
              "sm_100": Processor(128, 4, 2), "gfx942": Processor(128, 1, 1)}  # fmt: skip
#: TFLOP/s of the vendor's library, cuBLAS or hipBLASLt, called by torch.mm on bf16 matrices of the best shape: Stas
#: Bekman, "Machine Learning Engineering", table of maximum achievable matmul FLOPS. None is known for sm_86.
PUBLISHED = {"sm_80": 267.9, "sm_90": 794.5, "sm_100": 1745.0, "gfx942": 781.9}
#: seconds from a load to its data, of a memory that is busy: several hundred clocks
LATENCY = 0.6e-6
LOW_BYTES, FP32_BYTES = 2, 4


class Estimate(NamedTuple):
    """Seconds of our kernel, what takes most of them, and the configuration."""

    seconds: float
    limit: str
    config: Config
    pieces: int
    programs: int  # that a processor runs at once


def target_here(device: torch.device) -> str | None:
    """The target of the Triton kernels that a device is; None if it does not run them."""
    return target_of(device) if device.type == "cuda" and uses_triton(device) else None


def sustained(target: str, unit: str) -> float:
    """The share of the data sheet's rate that large products reach: clocks are lower under load, for every kernel."""
    peak = DEVICES[OF_TARGET[target]].peak[unit]
    return PUBLISHED[target] * TERA / peak if target in PUBLISHED else SUSTAINED[unit]


def fused_seconds(product: Product, target: str, wide: str, dtype: torch.dtype = torch.float16) -> float:
    """Seconds of our kernel, one of whose operands is fp32: ``wide`` is "left" or "right".

    >>> product = Product(16, 11008, 4096, aligned=(11008, 4096))
    >>> fused_seconds(product, "sm_80", "right") < library_seconds(product, "sm_80", 11008 * 4096)
    True
    """
    return fused_estimate(product, target, wide, dtype).seconds


def fused_estimate(
    product: Product, target: str, wide: str, dtype: torch.dtype = torch.float16, config: Config | None = None
) -> Estimate:
    """The estimate behind ``fused_seconds``. ``config``: another configuration than the one that is chosen.

    A processor runs several programs at once. They share its units, so a unit that all need sets the pace; and one
    program by itself converts a tile, multiplies it, and waits for the loads that are not there yet, one after another.
    """
    device, does = DEVICES[OF_TARGET[target]], PROCESSORS[target]
    chosen, pieces = choose(product.m, product.n, product.k, target, product.batch)
    config, pieces = (chosen, pieces) if config is None or config == chosen else (config, 1)
    low = "bf16" if dtype is torch.bfloat16 and target == "gfx942" else "fp16"  # others convert to both alike
    figures = FIGURES[target, config.name, f"{wide} {low}"]
    unit, clock = device.unit(dtype), device.peak["fp32"] / (2 * does.lanes * device.sms)
    rows, columns = config.block_m, config.block_n
    multiplying = 2 * rows * columns * config.block_k / (device.peak[unit] * sustained(target, unit) / device.sms)
    needs = {
        "tensor cores": multiplying,
        "issuing instructions": figures.instructions * config.warps / does.issued / clock,
        "converting": figures.converts * config.warps / does.converted / clock,
        "shared memory": figures.shared / does.shared / clock,
        "the L2 cache": figures.loaded / (device.bandwidth * CACHE / device.sms),
    }
    converting = max(needs["issuing instructions"], needs["converting"], needs["shared memory"])
    alone = max(multiplying + converting, LATENCY / max(config.stages - 1, 1))
    busiest = max(needs, key=lambda name: needs[name])

    def turn(programs: int) -> float:
        return max(programs * needs[busiest], alone)

    total = product.batch * ceil(product.m / rows) * ceil(product.n / columns) * pieces
    rounds, rest = divmod(ceil(total / device.sms), figures.programs)
    steps = ceil(ceil(product.k / pieces) / config.block_k)
    computing = steps * (rounds * turn(figures.programs) + (turn(rest) if rest else 0.0))
    computing += LATENCY * (rounds + bool(rest))  # the first load of a program has nothing to hide behind
    left, right = (FP32_BYTES if wide == side else LOW_BYTES for side in ("left", "right"))
    sums = 2 * pieces * product.m * product.n * FP32_BYTES * product.batch if pieces > 1 else 0
    moving = _moving(device, sums + product.batch * (product.m * product.k * left + product.k * product.n * right
                                                     + product.m * product.n * LOW_BYTES))  # fmt: skip
    together = min(figures.programs, ceil(total / device.sms))
    limit = "memory" if moving > computing else busiest if turn(together) > alone else "one program's steps in turn"
    launches = device.launch * (2 if pieces > 1 else 1)
    return Estimate(max(computing, moving) + launches, limit, config, pieces, figures.programs)


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
