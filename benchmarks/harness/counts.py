"""What a step does, counted: the same on every machine and in every run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from amp_compiler.profile import count_casts, count_ops


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one run: ops dispatched; casts written to memory and their bytes; the same inside of kernels of ours."""

    ops: int
    casts: int
    cast_bytes: int
    inside_casts: int
    inside_bytes: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def count(step: Callable[[], object]) -> Counts:
    """Run `step` and count; it should be warm."""
    casts = count_casts(step)
    return Counts(sum(count_ops(step).values()), casts.number, casts.bytes, *casts.inside)
