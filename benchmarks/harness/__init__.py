"""The measuring code of the benchmarks, independent of networks, scripts and claims.

A benchmark runs the baselines interleaved with ours, in the same run, and divides samples of the same round.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # read when torch is loaded; the profiler logs every start
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # torch 2.13: the key of Inductor's cache does not hold it, and code for one width of vectors runs with another
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{capability}")
    )
ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "tests") not in sys.path:
    sys.path.append(str(ROOT / "tests"))  # the networks are those of the tests

from .counts import Counts, count  # noqa: E402
from .growth import Growth, fit  # noqa: E402
from .machine import keep_freed_memory, machine, set_threads  # noqa: E402
from .memory import in_fresh_process, peak_bytes, peak_resident, saved_by_autograd, saved_in_graph  # noqa: E402
from .plots import bars, lines, panels  # noqa: E402
from .results import DTYPES, BadResult, Result, Row, Run, arguments, console, positive, read  # noqa: E402
from .timing import Ratio, Spread, interleave, interval, ms, ratio, sampled, spread  # noqa: E402

__all__ = [
    "DTYPES",
    "ROOT",
    "BadResult",
    "Counts",
    "Growth",
    "Ratio",
    "Result",
    "Row",
    "Run",
    "Spread",
    "arguments",
    "bars",
    "console",
    "count",
    "fit",
    "in_fresh_process",
    "interleave",
    "interval",
    "keep_freed_memory",
    "lines",
    "machine",
    "ms",
    "panels",
    "peak_bytes",
    "peak_resident",
    "positive",
    "ratio",
    "read",
    "sampled",
    "saved_by_autograd",
    "saved_in_graph",
    "set_threads",
    "spread",
]
