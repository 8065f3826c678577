"""``DataParallel`` and ``Sharded``: how the processes of a group train one model together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..common.errors import ArgumentError
from ..policy import dtype_name

_REDUCE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DataParallel:
    """Every process has the whole model and a part of the batch; the gradients are averaged inside the compiled step.

    Args:
        mesh_or_group: The processes that train together: a ``ProcessGroup``, a ``DeviceMesh`` of one dimension, or None
            for all of them.
        reduce_dtype: The dtype in which gradients are averaged. None averages low-precision gradients in fp32, as
            ``DistributedDataParallel`` does for an fp32 model; a low-precision dtype halves the traffic.
        bucket_mb: Gradients are sent in buckets of at most this size, in MiB.

    Examples:
        >>> from amp_compiler import DataParallel
        >>> DataParallel(bucket_mb=10)
        DataParallel(mesh_or_group=None, reduce_dtype=None, bucket_mb=10)
    """

    mesh_or_group: Any = None
    reduce_dtype: torch.dtype | None = None
    bucket_mb: float = 25

    def __post_init__(self) -> None:
        check_reduce_dtype(self.reduce_dtype)
        if isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, (int, float)) or not self.bucket_mb > 0:
            raise ArgumentError(f"bucket_mb must be a positive number of MiB, not {self.bucket_mb!r}.")


@dataclass(frozen=True)
class Sharded:
    """Every process has a part of each parameter, of its gradient, of the optimizer's state, and of the batch.

    The compiled step gathers parameters right before they are used, in low precision where every op reads them so, and
    averages the gradients such that each process gets its part. The model's parameters become ``DTensor`` parameters,
    divided by rows, when the step is compiled.

    Args:
        mesh: The processes that train together: a ``DeviceMesh`` of one dimension, or None for all of them.
        reshard_after_forward: Free the gathered parameters after the forward and gather them again for the backward.
            False keeps them in memory in between and halves the number of gathers.
        reduce_dtype: The dtype in which gradients are averaged. None averages low-precision gradients in fp32; a
            low-precision dtype halves the traffic.

    Examples:
        >>> from amp_compiler import Sharded
        >>> Sharded(reshard_after_forward=False)
        Sharded(mesh=None, reshard_after_forward=False, reduce_dtype=None)
    """

    mesh: Any = None
    reshard_after_forward: bool = True
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_reduce_dtype(self.reduce_dtype)
        if not isinstance(self.reshard_after_forward, bool):
            raise ArgumentError(f"reshard_after_forward must be True or False, not {self.reshard_after_forward!r}.")


def check_reduce_dtype(dtype: Any) -> None:
    """Raise unless ``dtype`` is None or one that gradients can be averaged in."""
    if dtype is not None and dtype not in _REDUCE_DTYPES:
        names = ", ".join(f"torch.{dtype_name(known)}" for known in _REDUCE_DTYPES)
        raise ArgumentError(f"reduce_dtype must be None or one of {names}, not {dtype!r}.")


def process_group(mesh_or_group: Any) -> dist.ProcessGroup:
    """Return the group of a ``ProcessGroup``, of a one-dimensional ``DeviceMesh``, or, for None, of all processes."""
    from torch.distributed.device_mesh import DeviceMesh

    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            "compile_train_step(parallel=...) needs a process group, but torch.distributed is not initialized.",
            hint="Start the script with torchrun and call torch.distributed.init_process_group() first.",
        )
    if mesh_or_group is None:
        group: Any = dist.group.WORLD
    elif isinstance(mesh_or_group, dist.ProcessGroup):
        group = mesh_or_group
    elif isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            raise ArgumentError(
                f"The mesh has {mesh_or_group.ndim} dimensions {mesh_or_group.mesh_dim_names or ''}, and the step is "
                "divided along one: name it, as in mesh['data']."
            )
        group = mesh_or_group.get_group()
    else:
        told = type(mesh_or_group).__name__
        raise ArgumentError(f"A process group or a DeviceMesh is expected, not {told}.")
    if dist.get_rank(group) < 0:
        raise ArgumentError("This process does not belong to the group that was given.")
    assert isinstance(group, dist.ProcessGroup)
    return group
