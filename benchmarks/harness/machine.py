"""Where a result was measured, and on how many threads."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from amp_compiler.kernels import capability

ROOT = Path(__file__).resolve().parents[2]
#: variables that choose the kernels of a CPU: ours, oneDNN's and torch's
SETTINGS = (
    "AMP_CPU_KERNELS", "AMP_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"
)  # fmt: skip
#: packages whose version can change a result, where they are installed
PACKAGES = ("torch", "triton", "numpy", "transformers", "matplotlib")


def machine() -> dict[str, str]:
    """Where and on what a result was measured."""
    return {
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "features": " ".join(capability.features()),
        "settings": " ".join(f"{name}={value}" for name in SETTINGS if (value := os.environ.get(name))),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        **_versions(),
        "commit": _commit(),
    }


def set_threads(number: int) -> None:
    """Let torch use this many threads inside an op."""
    torch.set_num_threads(number)


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for the next tensor.

    By default, glibc gives large blocks back to the operating system, and which blocks are large it learns from the
    process's history. A tensor in memory that is new costs a page fault for every 4 KiB: half the time of a small
    ResNet's inference, in one process and not in the next, and for one variant and not for the other.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if set_option is not None:
        trim_threshold, mmap_threshold = -1, -3  # as malloc.h names them
        set_option(trim_threshold, 2**31 - 1)
        set_option(mmap_threshold, 2**30) or set_option(mmap_threshold, 2**25)  # what earlier releases allow


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@functools.cache
def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
