"""How a training step's parameters are divided among processes: what ``gather_parameters`` and ``scatter_gradients``
have to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .reduction import Reduction


@dataclass(frozen=True)
class Sharding:
    """Every process of a group holds some rows of each parameter, as ``torch.chunk`` divides them: ``ceil(rows /
    processes)`` each, the last ones fewer or none.

    ``reduction`` names the group and says how gradients are averaged. Parameters and gradients of at most
    ``reduction.bucket_bytes`` together share a collective; a larger one has its own, and needs no packing.
    """

    reduction: Reduction
    rank: int
    reshard_after_forward: bool = True

    def chunk(self, rows: int) -> int:
        """The rows of a full chunk."""
        return -(-rows // self.reduction.size)

    def own_rows(self, rows: int) -> int:
        """The rows of this process."""
        chunk = self.chunk(rows)
        return max(min(rows - self.rank * chunk, chunk), 0)

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """A new tensor like the shard of ``value`` that this process holds; a number is held by all."""
        if value.dim() == 0:
            return torch.empty_like(value)
        shape = (self.own_rows(value.shape[0]), *value.shape[1:])
        return torch.empty(shape, dtype=value.dtype, device=value.device)


@dataclass(frozen=True)
class Gather:
    """One all-gather of a training step: which parameters, for which phase, and the bytes that are whole afterwards."""

    phase: str  # "forward" or "backward"
    names: tuple[str, ...]
    dtype: torch.dtype
    bytes: int
