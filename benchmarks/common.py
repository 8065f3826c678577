"""What every benchmark shares: the machine's description, interleaved timing, tables, result files.

A benchmark measures the peer in the same run, in turns with ours, and compares medians.
"""

from __future__ import annotations

import csv
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # read when torch is loaded; the profiler logs every start
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "tests"))  # the networks are those of the tests
from networks import BF16_ONLY, NETWORKS, BertLike, LlamaLike  # noqa: E402

__all__ = [
    "BF16_ONLY",
    "DTYPES",
    "NETWORKS",
    "BertLike",
    "LlamaLike",
    "NineLayers",
    "console",
    "interleave",
    "machine",
    "ms",
    "peak_memory",
    "print_header",
    "print_table",
    "sampled",
    "spread",
    "write_results",
]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MEASURED = "measured step"  # a mark in the profiler's record
# Where the output is a file or a pipe, rich would fold the tables to 80 columns.
console = Console(width=None if sys.stdout.isatty() else 160)


def machine() -> dict[str, str]:
    """Where and on what a result was measured."""
    features = {
        "avx2": torch.cpu._is_avx2_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "amx_fp16": torch.cpu._is_amx_fp16_supported(),
    }
    return {
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "features": " ".join(name for name, there in features.items() if there),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def print_header(title: str) -> dict[str, str]:
    """Print the title and the machine; returns the latter for `write_results`."""
    facts = machine()
    console.print(f"[bold]{title}[/bold]")
    console.print("  ".join(f"{name}: {value}" for name, value in facts.items()), highlight=False)
    return facts


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every case `rounds` times in turns, each round starting with another one.

    A case measures itself and returns seconds, so that its preparation stays out of the time.

    >>> order = []
    >>> cases = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    >>> interleave(cases, 2), order
    ({'a': [1.0, 1.0], 'b': [1.0, 1.0]}, ['a', 'b', 'b', 'a'])
    """
    samples: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            samples[name].append(cases[name]())
    return samples


def sampled(run: Callable[[], object], seconds: float = 0.2) -> Callable[[], float]:
    """A case for `interleave`: seconds a run, of as many runs as fill `seconds`; compiled and warm from the start."""
    for _ in range(3):
        run()
    start = time.perf_counter()
    run()
    repeats = max(1, round(seconds / (time.perf_counter() - start)))

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats

    return sample


def peak_memory(step: Callable[[], object], rest: Callable[[], object] = lambda: None) -> int:
    """The most bytes that a step holds at one time, beyond what was there before this call.

    The step runs twice, with `rest` in between, and the second run is measured: what the first one left behind counts.
    A free counts only if its memory was taken here. (Of older memory the profiler sees some frees and not others, and
    torch warns once.) It is torch's own memory, without what oneDNN and MKL take for themselves.

    >>> held = [torch.empty(1 << 18)]
    >>> def step():
    ...     held[0] = torch.empty(1 << 18)  # 1 MiB, made while the old one is still there
    ...     torch.empty(1 << 19)  # 2 MiB more, not kept
    >>> [peak_memory(step) >> 20 for _ in range(3)]
    [3, 3, 3]
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
        rest()
        with torch.profiler.record_function(_MEASURED):
            step()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.experimental_event_tree()
    for event in events:  # grows: a walk over the whole tree
        events.extend(event.children)
    events.sort(key=lambda event: event.start_time_ns)
    live: dict[int, int] = {}
    peak, measuring = 0, False
    for event in events:
        measuring |= event.name == _MEASURED
        if event.tag == torch._C._profiler._EventType.Allocation:
            size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
            if size > 0:
                live[address] = size
            else:
                live.pop(address, None)
            if measuring and size > 0:
                peak = max(peak, sum(live.values()))
    return peak


class NineLayers(nn.Module):
    """Nine linear layers in a row, as in Paddle's guide to mixed precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linears = nn.Sequential(*(nn.Linear(width, width) for _ in range(9)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linears(x)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def spread(samples: Sequence[float]) -> str:
    """Median and range, in milliseconds.

    >>> spread([0.001, 0.002, 0.004])
    '2.0 (1.0 to 4.0)'
    """
    return f"{ms(statistics.median(samples))} ({ms(min(samples))} to {ms(max(samples))})"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)


def write_results(name: str, facts: Mapping[str, str], rows: Sequence[Mapping[str, object]]) -> None:
    """Write `rows` to results/NAME.csv, and with the machine's description to results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / ".gitignore").write_text("*\n")
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": dict(facts), "rows": list(rows)}, indent=1))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    console.print(f"Written to {(RESULTS / name).relative_to(ROOT)}.csv and .json")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
