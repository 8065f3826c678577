"""From what a user asks for to what does it."""

from __future__ import annotations

from typing import Any

from ..common.errors import ArgumentError
from .data import DataEngine
from .spec import DataParallel


def make_engine(parallel: Any) -> DataEngine | None:
    """The engine of ``compile_train_step(parallel=...)``; None for a single process."""
    if parallel is None:
        return None
    if isinstance(parallel, DataParallel):
        return DataEngine(parallel)
    raise ArgumentError(f"parallel must be a DataParallel(...) or None, not {type(parallel).__name__}.")
