"""The scale of the loss that suits measured gradients."""

from __future__ import annotations

import dataclasses
import math

import torch

from ..runtime.record import Range
from .calibration import Calibration

#: powers of two that a scale may have
_POWERS = range(-24, 33)


def best_scale(calibration: Calibration, margin: float = 2.0) -> float:
    """Return the power of two that the loss should be multiplied by: the largest with which all gradients, times
    ``margin``, stay finite in the low-precision dtype. 1 for bf16, which has the range of fp32."""
    if calibration.dtype is torch.bfloat16:
        return 1.0
    largest = max((r.max_abs for r in _gradients(calibration)), default=0.0) / calibration.scale
    if not largest:
        return 1.0
    power = math.floor(math.log2(torch.finfo(calibration.dtype).max / (margin * largest)))
    return 2.0 ** min(max(power, _POWERS[0]), _POWERS[-1])


def flushed_share(calibration: Calibration, scale: float) -> float:
    """Return the share of the non-zero gradients that this scale, a power of two, leaves flushed to zero."""
    found = [r.times(scale / calibration.scale, calibration.dtype) for r in _gradients(calibration)]
    total = sum(r.nonzero for r in found)
    return sum(r.flushed for r in found) / total if total else 0.0


def with_scale(calibration: Calibration, scale: float) -> Calibration:
    """Return the calibration with its gradients as they are at another scale; the quotient is a power of two."""
    factor = scale / calibration.scale
    if factor == 1.0:
        return calibration
    rows = tuple(
        row if row.gradient is None
        else dataclasses.replace(row, gradient=row.gradient.times(factor, calibration.dtype))
        for row in calibration.rows
    )  # fmt: skip
    return dataclasses.replace(calibration, rows=rows, scale=scale)


def _gradients(calibration: Calibration) -> list[Range]:
    return [row.gradient for row in calibration.rows if row.gradient is not None]
