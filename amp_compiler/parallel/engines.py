"""Create the engine for what a user asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..common.errors import ArgumentError
from .data import DataEngine
from .spec import DataParallel


def make_engine(parallel: Any, disabled: Sequence[str] = ()) -> DataEngine | None:
    """Return the engine for ``compile_train_step(parallel=...)``; None for a single process. ``disabled``: names of
    passes."""
    if parallel is None:
        return None
    if "reduce_gradients" in disabled:
        raise ArgumentError(
            "reduce_gradients is what averages the gradients: with parallel=... it cannot be in disable_passes."
        )
    if isinstance(parallel, DataParallel):
        return DataEngine(parallel)
    raise ArgumentError(f"parallel must be a DataParallel(...) or None, not {type(parallel).__name__}.")
