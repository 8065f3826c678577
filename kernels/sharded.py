"""Lists of gradients of which some are DTensors: the kernels work on this rank's part, and the ranks agree on a flag.

One list may hold both kinds: ``parallelize_module`` leaves the parameters of other modules plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.common.torch_names import is_dtensor


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, with this rank's part, which shares the memory, in the place of a DTensor."""
    return [_local(tensor) if is_dtensor(tensor) else tensor for tensor in tensors]


def _local(tensor: Any) -> Tensor:
    with torch.no_grad():
        part: Tensor = tensor.to_local()
        return part.wait() if hasattr(part, "wait") else part  # a collective that is still under way


@torch.no_grad()
def agree_on_largest(flag: Tensor, tensors: Iterable[Tensor]) -> None:
    """Give ``flag`` its largest value of all ranks that hold parts of the tensors, in place."""
    import torch.distributed as dist

    meshes: list[Any] = []
    for tensor in tensors:
        mesh: Any = tensor.device_mesh if is_dtensor(tensor) else None  # type: ignore[attr-defined]
        if mesh is not None and mesh not in meshes:
            meshes.append(mesh)
    for mesh in meshes:
        for dim in range(mesh.ndim):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.get_group(dim))


def total_norm_of_shards(tensors: Sequence[Any]) -> Tensor:
    """The 2-norm of DTensors as of one long vector, the same on every rank."""
    norm: Any = torch.nn.utils.get_total_norm(list(tensors))
    found: Tensor = norm.full_tensor() if is_dtensor(norm) else norm
    return found
