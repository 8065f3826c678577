"""The fields of one row of the op table. The rows themselves are data in ``table.py``."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OpClass(enum.Enum):
    """How an op may be treated; every op belongs to one class (docs/design.md#op-classes)."""

    LOW = "low"  # heavy and safe: run in low precision, with fp32 accumulation (white list)
    FP32 = "fp32"  # sensitive to range or rounding: run in fp32 (black list)
    FOLLOW = "follow"  # arithmetic that the level decides
    EXACT = "exact"  # moves or selects values: rounding commutes with it
    KEEP = "keep"  # must get exactly the dtypes it was traced with


@dataclass(frozen=True, slots=True)
class Row:
    """One op: its class, the reason, and further facts that the class alone does not express.

    ``name`` is the ATen name without namespace and overload (``"linear"``); an in-place
    form shares the row of its plain op. ``keep_args`` names schema arguments that are never
    cast. ``fp32_inside`` says that torch's kernel computes in fp32 by itself, so low input
    and output are within one rounding of the fp32 op; ``fp32_args_on_cpu`` names the arguments
    that then stay fp32 on a CPU, whose kernels accept them like that and keep fp32 statistics for
    the backward (CUDA's don't accept them). ``fp32_results`` names results that are fp32 whatever
    the inputs are. ``fp32_only``: torch has no low-precision kernel for it, so it stays fp32 at every
    level. ``stride_bytes``: its kernels refuse operands whose strides are not multiples of this many
    bytes, so an operand that is fine in fp32 may be refused in a dtype of half the size; the op then
    stays fp32. ``banned`` is the error message for a use in fp16 that must be refused.
    """

    name: str
    cls: OpClass
    reason: str
    keep_args: tuple[str, ...] = ()
    fp32_inside: bool = False
    fp32_args_on_cpu: tuple[str, ...] = ()
    fp32_results: tuple[str, ...] = ()
    fp32_only: bool = False
    stride_bytes: int = 0
    banned: str = ""
