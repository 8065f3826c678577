"""Seconds of a node on a device: the longer of computing and moving bytes, and the launch of a kernel.

Few constants, each with its reason; none belongs to a single measurement.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import fx

from .. import ir
from .device import Device
from .products import CONVOLUTION, Product, products
from .traffic import is_free, is_pointwise, nbytes, reads, writes

#: share of the peak that large products reach: libraries get nearly all of ordinary units' rate; matrix units wait for
#: operands and lower their clock
SUSTAINED = {"fp32": 0.88, "tf32": 0.7, "fp16": 0.7, "bf16": 0.7}
#: share of a data sheet's bandwidth that a kernel which only moves bytes reaches
STREAMED = 0.8
#: bandwidth of the cache that all multiprocessors share, as a multiple of the memory's
CACHE = 3.0
#: sizes of the piece of a result that one multiprocessor computes, as libraries have kernels for
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (64, 32))
#: what is left of the rate of matrix units where rows do not begin at multiples of 16 bytes
UNALIGNED = 0.5
#: how much faster ordinary units convolve 3 × 3 places: Winograd's algorithm multiplies 2.25 times less often, and its
#: transforms take a part of that back
WINOGRAD = 1.5
#: a CPU computes these rather than waits for memory, at about this multiple of the time of an addition
FUNCTIONS = 4.0
FUNCTION_OPS = ("gelu", "silu", "exp", "log", "tanh", "sigmoid", "softmax", "norm", "pow", "rsqrt", "erf", "cos", "sin")
#: work of the backward of an op that isn't a product, as a multiple of its forward's traffic: it reads the gradient
#: beside what the forward read, and writes one gradient
BACKWARD_TRAFFIC = 1.5


class Seconds(NamedTuple):
    """What a node's kernel waits for, with the bytes that it moves and the kind of unit that computes its products."""

    compute: float
    memory: float
    launch: float
    nbytes: int = 0
    unit: str = "fp32"

    @property
    def total(self) -> float:
        return max(self.compute, self.memory) + self.launch


FREE = Seconds(0.0, 0.0, 0.0)


class CostModel:
    """Seconds of nodes on a device.

    ``fused``: chains of element-wise ops are one kernel, as Inductor makes them; otherwise each op is one. ``tf32``:
    products of fp32 operands run on TF32 units where the device has them.
    """

    def __init__(self, device: Device, *, fused: bool = False, tf32: bool = True) -> None:
        self.device, self.fused, self.tf32 = device, fused, tf32
        self.streamed = 1.0 if device.is_cpu else STREAMED  # a CPU's bandwidth is measured, not told

    def seconds(self, node: fx.Node, dtype: torch.dtype | None = None) -> float:
        """Seconds of a node. ``dtype``: as if all its floating operands and results had this one."""
        return self.parts(node, dtype).total

    def backward_seconds(self, node: fx.Node, dtype: torch.dtype | None = None) -> float:
        """Seconds of the backward of a node in a forward graph, estimated, as autodiff has not run yet: as long as the
        forward for each gradient of a product's factors. Zero where no operand can require a gradient."""
        wanting = [arg for _, arg in ir.tensor_args(node) if _may_need_gradient(arg)]
        if not wanting or is_free(node):
            return 0.0
        parts = self.parts(node, dtype)
        if products(node):
            factors = [arg for arg in wanting if (value := ir.tensor_of(arg)) is not None and value.dim() > 1]
            return parts.total * max(len(factors), 1)
        return parts._replace(memory=parts.memory * BACKWARD_TRAFFIC).total

    def cast_seconds(self, value: torch.Tensor, to: torch.dtype) -> float:
        """Seconds of a cast of a value to another dtype, as a kernel of its own."""
        return self._moving(nbytes(value, None) + nbytes(value, to)) + self.device.launch

    def parts(self, node: fx.Node, dtype: torch.dtype | None = None) -> Seconds:
        """What a node's kernel computes, moves and costs to launch."""
        if is_free(node):
            return FREE
        found = products(node)
        low = dtype or _operand_dtype(node)
        unit = self.device.unit(low, tf32=self.tf32)
        compute = sum(self.product_seconds(p, unit, low.itemsize) for p in found)
        given, made = list(reads(node, dtype)), writes(node, dtype)
        launch = self.device.launch * max(len(found), 1)
        if self.fused and is_pointwise(node):
            given = [(arg, size) for arg, size in given if not is_pointwise(arg)]
            if node.users and all(is_pointwise(user) for user in node.users):
                made, launch = 0, 0.0
        moved = sum(size for _, size in given) + made
        if self.device.is_cpu:
            moved = round(moved * _effort(node))
        convolves = any(p.kind == CONVOLUTION and not p.grouped for p in found)
        if convolves and unit != "fp32" and not self.device.is_cpu and not _is_channels_last(node):
            moved += 2 * moved  # matrix units read and write channels last: the library reorders before and after
        return Seconds(compute, self._moving(moved), launch, moved, unit)

    def product_seconds(self, product: Product, unit: str, itemsize: int, share: float | None = None) -> float:
        """Seconds of a product in the best of the tilings, launch not included. ``share``: of the unit's peak that
        large products reach, if it is known better than ``SUSTAINED``."""
        device = self.device
        if product.grouped:
            unit = "fp32"
        if device.is_cpu:
            return product.flops / device.peak.get(f"{unit}:{product.kind}", device.peak[unit])
        sustained = device.peak[unit] * (SUSTAINED[unit] if share is None else share)
        if unit != "fp32" and any(size * itemsize % 16 for size in product.aligned):
            sustained *= UNALIGNED
        if unit == "fp32" and product.dense3:
            sustained *= WINOGRAD
        return min(self._tiled(product, tile, sustained, itemsize) for tile in TILES)

    def _tiled(self, product: Product, tile: tuple[int, int], sustained: float, itemsize: int) -> float:
        """Tiles go to multiprocessors in waves; a sum over many terms is divided where that fills a wave."""
        device = self.device
        rows, columns = tile
        tiles = ceil(product.m / rows) * ceil(product.n / columns) * product.batch
        parts = min(max(device.sms // tiles, 1), max(product.k // 256, 1))
        terms = ceil(product.k / parts)
        waves = ceil(tiles * parts / device.sms)
        compute = 2 * rows * columns * terms / (sustained / device.sms)
        load = (rows + columns) * terms * itemsize / (device.bandwidth * CACHE / device.sms)
        return waves * max(compute, load)

    def _moving(self, size: int) -> float:
        return size / (self.device.bandwidth * self.streamed)


def _effort(node: fx.Node) -> float:
    """How long a CPU takes for a node's bytes, as a multiple of an element-wise op on fp32."""
    name = ir.op_name(node)
    slow = FUNCTIONS if any(word in name for word in FUNCTION_OPS) else 1.0
    return slow * 4 / _operand_dtype(node).itemsize  # so many elements, whatever their size


def _may_need_gradient(node: fx.Node) -> bool:
    value = ir.tensor_of(node)
    if value is None or not value.dtype.is_floating_point:
        return False
    # a trace does not say it of values in between
    return value.requires_grad or bool(node.meta.get(ir.PARAMETER)) or node.op != "placeholder"


def _is_channels_last(node: fx.Node) -> bool:
    """True if the results, or the first operand, lie in memory with their channels side by side."""
    values = [*ir.tensor_outputs(node), *(ir.tensor_of(arg) for _, arg in ir.tensor_args(node))]
    images = [v for v in values if v is not None and v.dim() > 3 and ir.concrete(v.shape[1]) > 1]
    return any(ir.concrete(v.stride(1)) == 1 for v in images)


def _operand_dtype(node: fx.Node) -> torch.dtype:
    """The dtype of what a node computes with: of its operands, or of its result where it has none."""
    if ir.op_name(node) == "amp::cast_matmul" and isinstance(node.args[3], torch.dtype):
        return node.args[3]
    values = [ir.tensor_of(arg) for _, arg in ir.tensor_args(node)] + list(ir.tensor_outputs(node))
    return next((v.dtype for v in values if v is not None and v.dtype.is_floating_point), torch.float32)
