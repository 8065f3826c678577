"""Decide how a CPU runs matrix products, convolutions, attention and LSTMs in fp16 or bf16: natively or wide.

*Wide* means: round the operands to the low-precision dtype, compute in fp32, round the result once. The numerics are
those of a low-precision unit (low operands, fp32 accumulation, low result); the speed is that of fp32. A CPU without
such units runs torch's native low-precision kernels 3 to 50 times slower than fp32. One with them multiplies faster
natively, but not everything: torch's attention uses the units of AMX only, an LSTM of ours has no native form, and for
a few rows reading the matrix takes the time, not multiplying (``takes_units``).

The CPU's feature flags decide first. If it has the units for a kind of work, they are used unless wide is clearly
faster in a measurement of a few milliseconds, made once per process. ``AMP_CPU_KERNELS=native`` or ``wide`` overrides
both. Wide kernels are compiled before the first graph that needs them is rewritten (``build.prepare``);
``AMP_CPU_KERNELS=python`` is wide without compiling. Nothing in this file compiles.
"""

from __future__ import annotations

import enum
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import capability, registry

SETTING = "AMP_CPU_KERNELS"
CHOICES = ("auto", "native", "wide", "python")
_SIZE = 256  # of the square matrices that are measured
_REPEATS = 15
_MARGIN = 1.25  # wide must be faster by this factor, so that noise does not make two processes differ
_FEW_ROWS = 8  # of the left operand: for so few, the bandwidth of the memory is the limit
_LITTLE_WORK = 1 << 20  # multiplications that take less time than oneDNN needs to begin


class Work(enum.Enum):
    """What is computed in low precision: each kind has its own choice."""

    PRODUCT = "matrix products"
    CONVOLUTION = "convolutions"
    ATTENTION = "attention"
    LSTM = "LSTMs"


_UNITS = {torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16"}), torch.float16: frozenset({"amx_fp16"})}
_AMX = frozenset({"amx_bf16", "amx_fp16"})


@dataclass(frozen=True)
class Choice:
    """Whether to run wide, and why: ``python -m amp_compiler doctor`` prints it."""

    wide: bool
    reason: str


def setting() -> str:
    """Return what ``AMP_CPU_KERNELS`` asks for; unset and empty mean "auto", an unknown value is a ``ValueError``."""
    asked = os.environ.get(SETTING) or "auto"
    if asked not in CHOICES:
        raise ValueError(f"{SETTING}={asked!r} is not one of: {', '.join(CHOICES)}.")
    return asked


def runs_wide(dtype: torch.dtype, work: Work = Work.PRODUCT) -> bool:
    """True if this kind of work is computed in fp32 on this CPU for this low-precision dtype."""
    return choose(dtype, setting(), work).wide


def any_runs_wide(dtype: torch.dtype) -> bool:
    """True if some kind of work is computed in fp32 on this CPU for this dtype."""
    return any(runs_wide(dtype, work) for work in reversed(Work))  # the last ones need no measurement


def product_runs_wide(dtype: torch.dtype, sizes: Sequence[Any]) -> bool:
    """True if a product of these sizes (batch, rows, summed, columns) is computed in fp32 on this CPU. A symbolic size
    counts as large."""
    if runs_wide(dtype):
        return True
    return setting() == "auto" and registry.loaded() and not takes_units(sizes)


def takes_units(sizes: Sequence[Any]) -> bool:
    """True if a product (batch, rows, summed, columns) is large enough for a CPU's low-precision units: below, our
    kernel is faster, as measured on a CPU with AVX512-BF16.

    >>> takes_units((1, 512, 512, 512)), takes_units((1, 1, 4096, 4096)), takes_units((1, 64, 64, 64))
    (True, False, False)
    """
    if not isinstance(sizes[1], int):
        return True
    return sizes[1] > _FEW_ROWS and not (all(isinstance(s, int) for s in sizes) and math.prod(sizes) <= _LITTLE_WORK)


def wants_compiled(dtype: torch.dtype) -> bool:
    """True if some work in this dtype is computed in fp32 with compiled kernels: call ``build.prepare`` before you run
    it."""
    return setting() != "python" and any_runs_wide(dtype)


def reason(dtype: torch.dtype, work: Work = Work.PRODUCT) -> str:
    """Return why this kind of work runs as it does, for a report: the reason of ``choose``, and whether kernels are
    compiled."""
    chosen = choose(dtype, setting(), work)
    return f"{chosen.reason}; {how_compiled()}" if chosen.wide else chosen.reason


def product_reason(dtype: torch.dtype) -> str:
    """Return why a product for which ``product_runs_wide`` is True runs wide."""
    if runs_wide(dtype):
        return reason(dtype)
    name = str(dtype).removeprefix("torch.")
    return f"too few rows, or too little work, for this CPU's {name} units to be faster; {how_compiled()}"


def how_compiled() -> str:
    """Return which of the kernels run, in a word or two."""
    return "compiled" if registry.loaded() else "in Python"


@functools.cache
def choose(dtype: torch.dtype, asked: str = "auto", work: Work = Work.PRODUCT) -> Choice:
    """Return the choice for a dtype. ``asked``: one of ``CHOICES``, as ``setting`` returns it."""
    if asked != "auto":
        return Choice(asked != "native", f"{SETTING}={asked}")
    name = str(dtype).removeprefix("torch.")
    if not has_units(dtype):
        return Choice(True, f"this CPU has no {name} units")
    if work is Work.LSTM:
        return Choice(True, "torch has no such layer that keeps its cells in float32")
    if work is Work.ATTENTION:
        if _AMX.isdisjoint(capability.features()):
            return Choice(True, f"torch's attention does not use this CPU's {name} units, only AMX")
        return _measured(dtype, "attention", measure_attention(dtype))
    if work is Work.CONVOLUTION:
        return choose(dtype, asked)
    return _measured(dtype, f"{_SIZE}³", measure(dtype))


def _measured(dtype: torch.dtype, what: str, seconds: tuple[float, float]) -> Choice:
    native, wide = seconds
    return Choice(wide * _MARGIN < native, f"measured {what}: native {native * 1e3:.2f} ms, wide {wide * 1e3:.2f} ms")


def has_units(dtype: torch.dtype) -> bool:
    """True if the CPU has units that multiply this dtype."""
    return not _UNITS[dtype].isdisjoint(capability.features())


def measure(dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds of one product of square matrices, native and wide, the best of several each. They are
    interleaved, so that other work on the machine slows down both."""
    a = torch.ones(_SIZE, _SIZE, dtype=dtype)
    return _best(lambda: torch.mm(a, a), lambda: torch.mm(a.float(), a.float()).to(dtype))


def measure_attention(dtype: torch.dtype) -> tuple[float, float]:
    """The same for an attention of two sequences of 128 tokens with four heads of 64, forward and backward."""
    low = torch.ones(2, 4, 128, 64, dtype=dtype)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def run(x: Tensor) -> None:
        result, logs = forward(x, x, x)
        backward(x, x, x, x, result, logs, 0.0, False)

    return _best(lambda: run(low), lambda: run(low.float()))


def _best(native: Callable[[], object], wide: Callable[[], object]) -> tuple[float, float]:
    best = [math.inf, math.inf]
    with torch.no_grad():
        for turn in range(_REPEATS + 1):  # the first turn warms up
            for place, run in enumerate((native, wide)):
                start = time.perf_counter()
                run()
                if turn:
                    best[place] = min(best[place], time.perf_counter() - start)
    return best[0], best[1]
