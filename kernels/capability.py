"""The capabilities of the CPU, and which of them the kernels may use.

``AMP_CPU_CAPABILITY=avx2`` treats a newer CPU as one that has AVX2 and nothing newer, to try out on one machine what
another will run: kernels are compiled for that kind of CPU, and existing low-precision units are not used. torch's own
kernels have other switches, which torch reads when it is imported: ``ATEN_CPU_CAPABILITY=avx2`` and
``ONEDNN_MAX_CPU_ISA=AVX2``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SETTING = "AMP_CPU_CAPABILITY"


@dataclass(frozen=True)
class Kind:
    """A kind of CPU: the compiler's name for it, and which extensions kernels may use (None: all of them)."""

    march: str
    extensions: frozenset[str] | None


KINDS = {
    "native": Kind("native", None),
    "avx512": Kind("x86-64-v4", frozenset({"avx2", "avx512"})),
    "avx2": Kind("x86-64-v3", frozenset({"avx2"})),
    "baseline": Kind("x86-64-v2", frozenset()),
}
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


def _all() -> tuple[str, ...]:
    found: Mapping[str, Any] = torch.cpu.get_capabilities()
    there = {"avx2": found.get("avx2", False), "avx512": all(found.get(f"avx512_{part}", False) for part in _AVX512)}
    there |= {unit: found.get(unit, False) for unit in ("avx512_bf16", "amx_bf16", "amx_fp16")}
    return tuple(name for name, is_there in there.items() if is_there)
