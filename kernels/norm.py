"""The 2-norm of a list of gradients, as of one long vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.common.torch_names import foreach_norm, is_dtensor, set_grad_enabled

from . import registry
from .sharded import total_norm_of_shards


def total_norm(tensors: Sequence[Tensor], device: torch.device, *, as_torch: bool = False) -> Tensor:
    """Return the norm as an fp32 number on ``device``, without a host sync unless the tensors are on the CPU.
    ``as_torch``: bit-identical to ``torch.nn.utils.get_total_norm``, for callers that clip; otherwise a CPU computes it
    in one pass, added up in fp64.

    >>> total_norm([torch.tensor([3.0]), torch.tensor([[4.0]])], torch.device("cpu"))
    tensor(5.)
    """
    enabled = torch.is_grad_enabled()
    set_grad_enabled(False)
    try:
        return _total_norm(tensors, device, as_torch)
    finally:
        set_grad_enabled(enabled)


def _total_norm(tensors: Sequence[Tensor], device: torch.device, as_torch: bool) -> Tensor:
    norms: list[Tensor] = []
    if shards := [x for x in tensors if type(x) is not Tensor and is_dtensor(x)]:
        norms.append(total_norm_of_shards(shards).to(device, torch.float32))
        tensors = [x for x in tensors if not is_dtensor(x)]
        if not tensors:
            return norms[0]
    if not as_torch and registry.loaded() and device.type == "cpu":
        norm, tensors = torch.ops.amp_cpu.norm(tensors)  # the remaining ones have another dtype, layout or device
        norms.append(torch.tensor(norm, dtype=torch.float32, device=device))
        if not tensors and len(norms) == 1:
            return norms[0]
    dense = [x if x.layout is torch.strided else x.coalesce().values() for x in tensors]
    for norm_of_one in foreach_norm(dense) if dense else ():
        norms.append(norm_of_one.to(device, torch.float32))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
