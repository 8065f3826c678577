"""The scale of the loss that suits measured gradients."""

from __future__ import annotations

import dataclasses

import torch

from ..policy import Policy
from ..policy.ops.row import OpClass
from ..runtime.record import Range, merge
from .calibration import Calibration

#: powers of two that a scale may have
_POWERS = range(-24, 33)
#: further gradients that a scale may flush to zero if it leaves more room on the other side, as a share of all
_FEW = 1e-4


def best_scale(calibration: Calibration, margin: float = 2.0) -> float:
    """Return the power of two that the loss should be multiplied by: one with which the gradients of the most ops fit
    the low-precision dtype and the fewest are flushed to zero. If there are several, the middle one, which leaves room
    on both sides. 1 for bf16, which has the range of fp32."""
    ranges = _gradients(calibration)
    if calibration.dtype is torch.bfloat16 or not ranges:
        return 1.0
    limits = torch.finfo(calibration.dtype)
    largest = [r.max_abs / calibration.scale * margin for r in ranges]
    least = limits.smallest_normal * margin * margin
    fitting = {p: sum(least <= m * 2.0**p <= limits.max for m in largest) for p in _POWERS}
    total = merge(ranges)
    flushed = {p: _flushed(total, 2.0**p / calibration.scale, calibration.dtype) for p in _POWERS}
    powers = [p for p in _POWERS if fitting[p] == max(fitting.values())]
    powers = [p for p in powers if flushed[p] <= min(flushed[p] for p in powers) + _FEW]
    powers = [p for p in powers if 2.0**p * margin <= limits.max] or powers  # the gradient of the loss itself
    return 2.0 ** powers[len(powers) // 2]


def _flushed(total: Range, factor: float, dtype: torch.dtype) -> float:
    """Return the share of the non-zero values that are flushed to zero if all are multiplied by a power of two."""
    return total.times(factor, dtype).flushed / total.nonzero


def with_scale(calibration: Calibration, scale: float) -> Calibration:
    """Return the calibration with its gradients as they are at another scale; the quotient is a power of two."""
    factor = scale / calibration.scale
    if factor == 1.0:
        return calibration
    rows = tuple(
        dataclasses.replace(
            row, gradient=_times(row.gradient, factor, calibration.dtype),
            operand_gradients=tuple(r.times(factor, calibration.dtype) for r in row.operand_gradients),
        )
        for row in calibration.rows
    )  # fmt: skip
    return dataclasses.replace(calibration, rows=rows, scale=scale)


def _times(values: Range | None, factor: float, dtype: torch.dtype) -> Range | None:
    return None if values is None else values.times(factor, dtype)


def _gradients(calibration: Calibration) -> list[Range]:
    """Return the ranges of the gradients that may be computed in low precision: not those of single numbers, such as
    the loss, and of ops of the black list."""
    policy = Policy("O2", calibration.dtype)
    rows = [r for r in calibration.rows if r.result.elements > calibration.batches]
    rows = [r for r in rows if policy.classify(r.op).cls in (OpClass.LOW, OpClass.FOLLOW)] or list(calibration.rows)
    return [g for row in rows for g in (row.gradient, *row.operand_gradients) if g is not None and g.max_abs]
