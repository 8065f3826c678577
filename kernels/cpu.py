"""Decide how a CPU runs matrix products, convolutions and attention in fp16 or bf16: natively or wide.

*Wide* means: round the operands to the low-precision dtype, compute in fp32, round the result once. The numerics are
those of a low-precision unit (low operands, fp32 accumulation, low result); the speed is that of fp32. A CPU without
such units runs torch's native low-precision kernels 3 to 50 times slower than fp32; one with them is faster natively.

The CPU's feature flags decide first. If it has the units, they are used unless wide is clearly faster in a measurement
of a few milliseconds, made once per process. ``AMP_CPU_KERNELS=native`` or ``wide`` overrides both. Wide kernels are
compiled before the first graph that needs them is rewritten (``build.prepare``); ``AMP_CPU_KERNELS=python`` is wide
without compiling. Nothing in this file compiles.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import capability, registry

SETTING = "AMP_CPU_KERNELS"
CHOICES = ("auto", "native", "wide", "python")
_SIZE = 256  # of the square matrices that are measured
_REPEATS = 15
_MARGIN = 1.25  # wide must be faster by this factor, so that noise does not make two processes differ
_UNITS = {torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16"}), torch.float16: frozenset({"amx_fp16"})}


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


def runs_wide(dtype: torch.dtype) -> bool:
    """True if matrix products in this low-precision dtype are computed in fp32 on this CPU."""
    return choose(dtype, setting()).wide


def wants_compiled(dtype: torch.dtype) -> bool:
    """True if they are, with compiled kernels: call ``build.prepare`` before you run such products."""
    return setting() != "python" and runs_wide(dtype)


def reason(dtype: torch.dtype) -> str:
    """Return why products run as they do, for a report: the reason of ``choose``, and whether kernels are compiled."""
    chosen = choose(dtype, setting())
    return f"{chosen.reason}; {'compiled' if registry.loaded() else 'in Python'}" if chosen.wide else chosen.reason


@functools.cache
def choose(dtype: torch.dtype, asked: str = "auto") -> Choice:
    """Return the choice for a dtype. ``asked``: one of ``CHOICES``, as ``setting`` returns it."""
    if asked != "auto":
        return Choice(asked != "native", f"{SETTING}={asked}")
    if not has_units(dtype):
        return Choice(True, f"this CPU has no {str(dtype).removeprefix('torch.')} units")
    native, wide = measure(dtype)
    return Choice(wide * _MARGIN < native, f"measured {_SIZE}³: native {native * 1e3:.2f} ms, wide {wide * 1e3:.2f} ms")


def has_units(dtype: torch.dtype) -> bool:
    """True if the CPU has units that multiply this dtype."""
    return not _UNITS[dtype].isdisjoint(capability.features())


def measure(dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds of one product of square matrices, native and wide, the best of several each. They are
    interleaved, so that other work on the machine slows down both."""
    a = torch.ones(_SIZE, _SIZE, dtype=dtype)
    runs: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.mm(a, a),
        lambda: torch.mm(a.float(), a.float()).to(dtype),
    )
    best = [math.inf, math.inf]
    with torch.no_grad():
        for turn in range(_REPEATS + 1):  # the first turn warms up
            for place, run in enumerate(runs):
                start = time.perf_counter()
                run()
                if turn:
                    best[place] = min(best[place], time.perf_counter() - start)
    return best[0], best[1]
