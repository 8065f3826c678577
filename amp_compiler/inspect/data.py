"""The contents of a report: rows, kernels and totals as plain values, which every renderer reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..rewrite.records import Record

LOW = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Row:
    """One op of one captured graph."""

    node: str
    op: str
    module: str
    source: str
    precision: str
    reason: str
    rule: str
    graph: int
    flops: int = 0
    #: the nodes whose precision, value or dtype led to it, the most important first
    causes: tuple[str, ...] = ()
    #: a number that became the limit of the low-precision dtype, in words; ``reason`` ends with it
    limit: str = ""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.node} ({self.op}{where}): {self.precision}, {self.reason}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """How often one of our ops runs instead of ATen's, and why, in forward and backward."""

    op: str
    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} × {self.op}: {self.reason}"


@dataclass(frozen=True)
class ReportData:
    """Rows and totals. ``casts`` and ``cast_bytes`` are those of the graphs as they run: forward and backward
    after folding once a graph was differentiated, the forward alone before."""

    rows: tuple[Row, ...] = ()
    level: str = ""
    dtype: str = ""
    casts: int = 0
    cast_bytes: int = 0
    low_flops_share: float = 0.0
    by_precision: dict[str, int] = field(default_factory=dict)
    not_captured: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    #: shares of the work that ran "captured", under "autocast" and in "float32"; None unless ``inputs`` were given
    work: dict[str, float] | None = None
    #: module path -> its share of ``casts``; None where that is not known
    casts_by_module: dict[str, int] | None = None
    #: memory that the CPU kernels keep in this process for their next calls, for all models together
    scratch_bytes: int = 0
    #: the graphs after each stage, for pictures
    stages: tuple[Record, ...] = field(default=(), repr=False, compare=False)


def work_line(work: Mapping[str, float]) -> str:
    """Return the shares of work as one line."""
    return (f"work by FLOPs: {work['captured']:.1%} captured, {work['autocast']:.1%} under autocast, "
            f"{work['float32']:.1%} in float32 outside of graphs")  # fmt: skip
