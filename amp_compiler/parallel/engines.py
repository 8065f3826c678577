"""Create the engine for what a user asks for. Engines import torch.distributed, so they are imported on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..common.errors import ArgumentError
from .spec import DataParallel

if TYPE_CHECKING:
    from .data import DataEngine


def make_engine(parallel: Any, model: nn.Module, disabled: Sequence[str] = ()) -> DataEngine | None:
    """Return the engine for ``compile_train_step(parallel=...)``; None for a single process. ``disabled``: names of
    passes."""
    if parallel is None:
        return None
    if not isinstance(parallel, DataParallel):
        raise ArgumentError(f"parallel must be a DataParallel(...) or None, not {type(parallel).__name__}.")
    if "reduce_gradients" in disabled:
        raise ArgumentError(
            "reduce_gradients is what averages the gradients: with parallel=... it cannot be in disable_passes."
        )
    _check_plain(model)
    from .data import DataEngine

    return DataEngine(parallel)


def _check_plain(model: nn.Module) -> None:
    """A model that is divided among processes already would be averaged twice."""
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    for path, module in model.named_modules():
        where = f"The module {path!r}" if path else "The model"
        if isinstance(module, DistributedDataParallel):
            raise ArgumentError(
                f"{where} is wrapped in DistributedDataParallel, which averages the gradients itself: give the module "
                "inside of it (.module), or leave parallel=... out."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ArgumentError(
                f"The parameter {name!r} is a DTensor: the model is sharded already, by fully_shard or "
                "parallelize_module. Leave parallel=... out."
            )
