"""What one row of the op table says. The rows themselves are data in ``table.py``."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OpClass(enum.Enum):
    """How an op may be treated; every op belongs to one class (docs/design.md#op-classes)."""

    LOW = "low"  # heavy and safe: run in the low dtype, fp32 accumulation (white list)
    FP32 = "fp32"  # range or rounding hurts: run in fp32 (black list)
    FOLLOW = "follow"  # arithmetic that the level decides
    EXACT = "exact"  # moves or selects values: rounding commutes with it
    KEEP = "keep"  # sees exactly the dtypes it was traced with


@dataclass(frozen=True, slots=True)
class Row:
    """One op: its class, the reason, and what the class alone does not say.

    ``name`` is the ATen name without namespace and overload (``"linear"``); an in-place
    form shares the row of its plain op. ``keep_args`` names schema arguments that are never
    cast. ``fp32_inside`` says that torch's kernel computes in fp32 by itself, so low input
    and output are within one rounding of the fp32 op; ``fp32_args_on_cpu`` names the arguments
    that stay fp32 then on a CPU, whose kernels take them so and keep fp32 statistics for the
    backward (CUDA's do not take them). ``fp32_results`` names results that are fp32 whatever goes
    in. ``fp32_only``: torch has no low-precision kernel for it, so
    it stays fp32 whatever the level. ``stride_bytes``: its kernels refuse operands whose strides are
    not multiples of so many bytes, so that an operand which is fine in fp32 may be refused in a dtype of
    half the size; the op stays fp32 then. ``banned`` is the message for a use in fp16 that must be
    refused.
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
