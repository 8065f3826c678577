"""Counts of what a step does, which are the same on every machine and in every run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from amp_compiler.inspect.profile import count_all


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of one run: ops dispatched; casts written to memory and their bytes; conversions inside our kernels;
    floating-point operations of products with fp16 or bf16 operands and of all others.

    Kernels that Inductor generated aren't ops, and what is fused into them is not counted."""

    ops: int
    casts: int
    cast_bytes: int
    inside_casts: int
    inside_bytes: int
    flops_low: int
    flops_fp32: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def count(step: Callable[[], object]) -> Counts:
    """Run `step` and count. It should have run before."""
    found = count_all(step)
    low = sum(number for dtype, number in found.flops.items() if dtype.itemsize < 4)
    casts, ops = found.casts, sum(found.ops.values())
    return Counts(ops, casts.number, casts.bytes, *casts.inside, low, sum(found.flops.values()) - low)
