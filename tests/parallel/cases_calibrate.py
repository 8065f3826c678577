"""Calibrations by several processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_compiler import CalibrationError, calibrate


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(rank: int) -> tuple[Tensor, Tensor]:
    return (10.0**rank) * torch.ones(3, 4), torch.zeros(3, 2)


def together() -> Any:
    """Each process with a batch of its own, and one process with both."""
    found = calibrate(model(), [batch(dist.get_rank())], mean_square)
    alone = calibrate(model(), [batch(rank) for rank in range(2)], mean_square, all_ranks=False)
    return [
        [(c.batches, c.scale), [(r.op, r.number, r.max_abs, r.result.elements, r.sensitivity) for r in c.rows]]
        for c in (found, alone)
    ]


def failing() -> Any:
    """One process has no batch."""
    try:
        calibrate(model(), [batch(0)] if dist.get_rank() == 0 else [], mean_square)
    except CalibrationError as error:
        return str(error)
    return ""


CASES = {"together": together, "failing": failing}
