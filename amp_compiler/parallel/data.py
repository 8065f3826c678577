"""Data parallelism: every process has the whole model, and the gradients are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

# Registers how the functional collectives behave on fake tensors (torch 2.13 to 2.15 do it nowhere else).
import torch.distributed._functional_collectives
from torch import Tensor, fx

from .. import ir
from ..common.gradients import set_gradient
from ..rewrite.reduction import Layout, Reduction
from .agreement import change_together, check_agreement, facts_of, next_key
from .engine import Engine
from .spec import DataParallel, process_group


class DataEngine(Engine):
    """Averages the gradients of a compiled training step, as a ``DataParallel`` asks for."""

    together = reduces_outside = True

    def __init__(self, spec: DataParallel) -> None:
        self.spec, self.group = spec, process_group(spec.mesh_or_group)
        self.size = dist.get_world_size(self.group)
        self.layouts: tuple[Layout, ...] = ()
        self.agreed = False
        self.key = next_key()

    def begin(self, tensors: Sequence[Tensor], facts: Mapping[str, str]) -> None:
        """Check that all processes agree, then broadcast the first one's values."""
        check_agreement(self.group, facts, "at compile_train_step")
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    def reduction(self, *, of_sums: bool) -> Reduction:
        """Return what the pass ``reduce_gradients`` has to know."""
        size = int(self.spec.bucket_mb * (1 << 20))
        return Reduction(self.group.group_name, self.size, self.spec.reduce_dtype, size, self.layouts, of_sums)

    def captured(self, graph: fx.GraphModule, joint: fx.GraphModule) -> None:
        """Called for each graph that reduces: all processes must have the same buckets."""
        layout: Layout = joint.meta[ir.BUCKETS]
        if self.agreed and layout not in self.layouts:
            change_together(self.group, f"{self.key}/{len(self.layouts)}", layout,
                            "other parameters get gradients than in earlier steps")  # fmt: skip
        if layout not in self.layouts:
            self.layouts += (layout,)
        self._agree(facts_of(graph))

    def broken(self, reason: str) -> None:
        """Called when the step runs in pieces, from the first step on or later."""
        if self.agreed:
            change_together(self.group, f"{self.key}/pieces", (), reason)
        self._agree({"the captured graph": f"none ({reason})"})

    def _agree(self, facts: Mapping[str, str]) -> None:
        if not self.agreed:
            check_agreement(self.group, facts, "in their first step")
            self.agreed = True

    @torch.no_grad()
    def reduce_(self, parameters: Mapping[str, Tensor]) -> None:
        """Average the gradients that the parameters hold, outside of a graph. One that no process has stays None."""
        names = [name for name, p in parameters.items() if p.requires_grad]
        if not names:
            return
        device = parameters[names[0]].device
        held = torch.tensor([parameters[name].grad is not None for name in names], dtype=torch.uint8, device=device)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.group)
        used = [name for name, flag in zip(names, held.tolist(), strict=True) if flag]
        reduction = self.reduction(of_sums=False)
        for bucket in _buckets([(name, parameters[name]) for name in reversed(used)], reduction):
            dtype = reduction.dtype_for(bucket[0].dtype)
            flat = torch.cat([_gradient(p).to(dtype).reshape(-1) for p in bucket]).div_(self.size)
            dist.all_reduce(flat, group=self.group)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                set_gradient(parameter, part.view(parameter.shape).to(parameter.grad_dtype or parameter.dtype))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()


def _buckets(parameters: Sequence[tuple[str, Tensor]], reduction: Reduction) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []
    held = 0
    for _, parameter in parameters:
        size = parameter.numel() * reduction.dtype_for(parameter.dtype).itemsize
        if not found or found[-1][0].dtype != parameter.dtype or held + size > reduction.bucket_bytes:
            found.append([])
            held = 0
        found[-1].append(parameter)
        held += size
    return found
