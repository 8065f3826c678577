"""A calibration by several processes, each with its own batches: what they measured is put together."""

from __future__ import annotations

import functools

import torch.distributed as dist

from ..common.errors import CalibrationError
from .calibration import Calibration


def are_several() -> bool:
    """True if this is one of several processes of ``torch.distributed``."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def over_ranks(own: Calibration | None) -> Calibration:
    """Return the calibration over the batches of all processes, the same in each; all of them must call it. None says
    that this process failed, which raises an error in the others instead of letting them wait."""
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if own is None else own.to_json())
    failed = [rank for rank, text in enumerate(everyone) if text is None]
    if failed:
        raise CalibrationError(f"The calibration failed in rank {failed[0]}: see the error there.")
    parts = [Calibration.from_json(text, where=f"Rank {rank}") for rank, text in enumerate(everyone) if text]
    return functools.reduce(Calibration.merged, parts)
