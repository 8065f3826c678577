"""How a training step's gradients are averaged over processes: what the pass ``reduce_gradients`` has to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: names of parameters, bucket by bucket, in the order in which the buckets are reduced
Layout = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Reduction:
    """An average over the processes of a group.

    ``group`` is the name by which functional collectives know the group. ``dtype`` is the dtype of the communication;
    None widens low-precision gradients to fp32 and keeps the others. ``bucket_bytes`` bounds the size of a bucket, of
    which each has at least one gradient. ``layouts`` are those of earlier graphs: one with the same gradients is used
    again, otherwise the pass chooses. All processes of a group must use the same layout, since collectives are matched
    by their order.
    """

    group: str
    size: int
    dtype: torch.dtype | None = None
    bucket_bytes: int = 25 << 20
    layouts: tuple[Layout, ...] = ()
    #: this graph ends an update of several micro-batches: it adds its gradients to the sums so far and reduces those
    of_sums: bool = False

    def dtype_for(self, gradient: torch.dtype) -> torch.dtype:
        """Return the dtype in which a gradient is sent."""
        if self.dtype is not None:
            return self.dtype
        return torch.float32 if gradient in (torch.float16, torch.bfloat16) else gradient
