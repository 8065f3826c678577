"""Where a result was measured, and on how many threads."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from amp_compiler.kernels import capability

ROOT = Path(__file__).resolve().parents[2]
#: packages whose version can change a result, where they are installed
PACKAGES = ("torch", "triton", "numpy", "transformers", "matplotlib")


def machine() -> dict[str, str]:
    """Where and on what a result was measured."""
    return {
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "features": " ".join(capability.features()),
        "kernels": os.environ.get("AMP_CPU_KERNELS", "auto"),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        **_versions(),
        "commit": _commit(),
    }


def set_threads(number: int) -> None:
    """Let torch use this many threads inside an op."""
    torch.set_num_threads(number)


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
