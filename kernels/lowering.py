"""Kernels that replace an ATen op, one row each: ``lower_kernels`` rewrites graphs according to this table.

A kernel has the arguments and results of the op that it replaces. To add one, write its file and add its rows to
``ALL`` below; CONTRIBUTING has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from amp_compiler.common.torch_names import OpOverload, schema_of

from . import lstm, wide
from .cpu import Work, reason, runs_wide

LOW = wide.LOW


@dataclass(frozen=True, slots=True)
class Lowering:
    """One kernel. ``op``: the ATen op that it replaces. ``kernel``: our op; the same as ``op`` if that is one of ours
    already, which reports then show. ``why(values)``: why it replaces the op for these (fake) operands, as shown in
    reports; empty if it should not. ``saved``: numbers of the results that only a backward reads; where nothing reads
    them, the kernel is called with ``keeps=False`` and leaves them empty."""

    op: OpOverload
    kernel: OpOverload
    why: Callable[[Sequence[Tensor]], str]
    saved: tuple[int, ...] = ()


def computed_in_fp32(work: Work, values: Sequence[Tensor]) -> str:
    """Return the reason for a kernel that computes in fp32, where the CPU's own low-precision kernels are slower."""
    low = {v.dtype for v in values if v.dtype in LOW}
    if len(low) != 1 or any(v.device.type != "cpu" for v in values):
        return ""
    dtype = next(iter(low))
    return f"computed in float32: {reason(dtype, work)}" if runs_wide(dtype, work) else ""


#: every kernel that replaces an op
ALL = (
    *(Lowering(op, wide.FORMS[op], partial(computed_in_fp32, work)) for op, work in wide.OPS.items()),
    Lowering(lstm.FORWARD, lstm.FORWARD, partial(computed_in_fp32, Work.LSTM), lstm.SAVED),
    Lowering(lstm.BACKWARD, lstm.BACKWARD, partial(computed_in_fp32, Work.LSTM)),
)
BY_OP = {lowering.op: lowering for lowering in ALL}
#: name of a kernel -> name of the op that it replaces, as the profiler knows them
STANDS_FOR = {schema_of(row.kernel).name: schema_of(row.op).name for row in ALL}
