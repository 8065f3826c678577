"""Create the engine for what a user asks for. Engines import torch.distributed, so they are imported on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..common.errors import ArgumentError
from .engine import Engine
from .shards import is_divided
from .spec import DataParallel, Sharded

#: the passes without which several processes would not compute what one does
_NEEDED = {
    DataParallel: {"reduce_gradients": "averages the gradients"},
    Sharded: {"gather_parameters": "gathers the parameters", "scatter_gradients": "averages the gradients"},
}


def make_engine(parallel: Any, model: nn.Module, disabled: Sequence[str] = ()) -> Engine:
    """Return the engine for ``compile_train_step(parallel=...)``. ``disabled``: names of passes."""
    if parallel is None:
        return Engine()
    if not isinstance(parallel, (DataParallel, Sharded)):
        told = type(parallel).__name__
        raise ArgumentError(f"parallel must be a DataParallel(...), a Sharded(...) or None, not {told}.")
    for name, does in _NEEDED[type(parallel)].items():
        if name in disabled:
            raise ArgumentError(f"{name} is what {does}: with parallel=... it cannot be in disable_passes.")
    _check_plain(model, but_divided=isinstance(parallel, Sharded))
    if isinstance(parallel, Sharded):
        from .sharded import ShardEngine

        return ShardEngine(parallel)
    from .data import DataEngine

    return DataEngine(parallel)


def _check_plain(model: nn.Module, *, but_divided: bool) -> None:
    """A model that is divided among processes already would be averaged twice. ``but_divided``: one that an earlier
    step divided may be taken over."""
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
        if isinstance(parameter, DTensor) and not (but_divided and is_divided(parameter)):
            raise ArgumentError(
                f"The parameter {name!r} is a DTensor: the model is sharded already, by fully_shard or "
                "parallelize_module. Leave parallel=... out."
            )
