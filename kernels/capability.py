"""The capabilities of the CPU, and which of them the kernels may use.

``AMP_CPU_CAPABILITY=avx2`` treats a newer CPU as one that has AVX2 and nothing newer, to try out on one machine what
another will run: the kernels for that kind of CPU are loaded, and existing low-precision units are not used. torch's
own kernels have other switches, which torch reads when it is imported: ``ATEN_CPU_CAPABILITY=avx2`` and
``ONEDNN_MAX_CPU_ISA=AVX2``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SETTING = "AMP_CPU_CAPABILITY"


@dataclass(frozen=True)
class Kind:
    """A kind of CPU: which extensions kernels may use (None: all of them)."""

    extensions: frozenset[str] | None


KINDS = {
    "native": Kind(None),
    "avx512": Kind(frozenset({"avx2", "avx512"})),
    "avx2": Kind(frozenset({"avx2"})),
    "baseline": Kind(frozenset()),
}
_AVX2 = ("fma3", "f16c", "bmi", "bmi2", "lzcnt")  # what x86-64-v3 has beside AVX2: every such CPU, if not switched off
_AVX512 = ("f", "bw", "vl", "dq", "cd")  # the parts that make up x86-64-v4


def chosen() -> Kind:
    """Return the kind that ``AMP_CPU_CAPABILITY`` names, or this machine's own."""
    setting = os.environ.get(SETTING) or "native"
    if setting not in KINDS:
        raise ValueError(f"{SETTING}={setting!r} is not one of: {', '.join(KINDS)}.")
    kind = KINDS[setting]
    missing = sorted((kind.extensions or frozenset()) - set(_all()))
    if missing:
        raise ValueError(f"{SETTING}={setting} asks for {' and '.join(missing)}, which this CPU does not have.")
    return kind


def features() -> tuple[str, ...]:
    """Return the extensions of this CPU that matter to the kernels and that they may use.

    >>> os.environ["AMP_CPU_CAPABILITY"] = "baseline"; features()
    ()
    >>> del os.environ["AMP_CPU_CAPABILITY"]
    """
    allowed = chosen().extensions
    return tuple(name for name in _all() if allowed is None or name in allowed)


def kernel_kind() -> str | None:
    """Return the kind of CPU that the compiled kernels are wanted for; None if they would need more than there is.

    On machines other than x86-64 the kernels are plain C++, compiled for the machine itself.
    """
    if platform.machine() != "x86_64":
        return "native"
    return next((kind for kind in ("avx512", "avx2") if kind in features()), None)


def _all() -> tuple[str, ...]:
    found: Mapping[str, Any] = torch.cpu.get_capabilities()
    there = {
        "avx2": found.get("avx2", False) and all(found.get(part, True) for part in _AVX2),
        "avx512": all(found.get(f"avx512_{part}", False) for part in _AVX512),
    }
    there |= {unit: found.get(unit, False) for unit in ("avx512_bf16", "amx_bf16", "amx_fp16")}
    return tuple(name for name, is_there in there.items() if is_there)
