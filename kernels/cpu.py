"""How a CPU should run matrix products, convolutions and attention in fp16 or bf16: as they are, or wide.

*Wide* is: round the operands to the low dtype, compute in fp32, round the result once. The numerics are those of a
low-precision unit (low operands, fp32 accumulation, low result); the speed is that of fp32. A CPU without such units
runs torch's native low-precision kernels 3 to 50 times slower than fp32, one with them is faster natively.

What the CPU says it has decides first; where it has the units, a measurement of a few milliseconds, once a process,
decides. ``AMP_CPU_KERNELS=native`` or ``wide`` overrides both. Wide kernels are compiled before the first graph that
needs them is rewritten (``build.prepare``); ``AMP_CPU_KERNELS=python`` is wide without that. Nothing here compiles.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass

import torch

from . import capability, registry

SETTING = "AMP_CPU_KERNELS"
CHOICES = ("auto", "native", "wide", "python")
_SIZE = 256  # of the square matrices that are measured
_REPEATS = 5
_UNITS = {torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16"}), torch.float16: frozenset({"amx_fp16"})}


@dataclass(frozen=True)
class Choice:
    """Whether to run wide, and why: ``python -m amp_compiler doctor`` prints it."""

    wide: bool
    reason: str


def setting() -> str:
    """What ``AMP_CPU_KERNELS`` asks for; unset and empty are "auto", an unknown value is a ``ValueError``."""
    asked = os.environ.get(SETTING) or "auto"
    if asked not in CHOICES:
        raise ValueError(f"{SETTING}={asked!r} is none of: {', '.join(CHOICES)}.")
    return asked


def runs_wide(dtype: torch.dtype) -> bool:
    """True if matrix products in this low dtype are computed in fp32 on this CPU."""
    return choose(dtype, setting()).wide


def wants_compiled(dtype: torch.dtype) -> bool:
    """True if they are, and by the compiled kernels: call ``build.prepare`` before you run such products."""
    return setting() != "python" and runs_wide(dtype)


def reason(dtype: torch.dtype) -> str:
    """Why products run as they do, for a report: what ``choose`` says, and whether the kernels are compiled."""
    chosen = choose(dtype, setting())
    return f"{chosen.reason}; {'compiled' if registry.loaded() else 'in Python'}" if chosen.wide else chosen.reason


@functools.cache
def choose(dtype: torch.dtype, asked: str = "auto") -> Choice:
    """The choice for a dtype. ``asked``: one of ``CHOICES``, as ``setting`` gives it."""
    if asked != "auto":
        return Choice(asked != "native", f"{SETTING}={asked}")
    if not has_units(dtype):
        return Choice(True, f"this CPU has no {str(dtype).removeprefix('torch.')} units")
    native, wide = measure(dtype)
    return Choice(wide < native, f"measured {_SIZE}³: native {native * 1e3:.2f} ms, wide {wide * 1e3:.2f} ms")


def has_units(dtype: torch.dtype) -> bool:
    """True if the CPU multiplies this dtype itself."""
    return not _UNITS[dtype].isdisjoint(capability.features())


def measure(dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of one product of square matrices, native and wide, the best of a few each."""
    a = torch.ones(_SIZE, _SIZE, dtype=dtype)

    def best(run: object) -> float:
        assert callable(run)
        run()
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    with torch.no_grad():
        return best(lambda: torch.mm(a, a)), best(lambda: torch.mm(a.float(), a.float()).to(dtype))
