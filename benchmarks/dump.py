"""`amp-compiler dump --format html` of a BERT: how long it takes, how large the page is, how fast a browser opens it.

The command runs in a process of its own, as a user starts it, including the imports of torch and transformers. The
baseline in the same run is the cost of everything before our part: the same process with the model created and
`torch.export.export` called on it. Both times are shown: wall-clock time, and CPU time, which is what a machine without
other work would need. The page is opened in headless Chromium, if there is one; its time ends when it has been drawn.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import Ratio, Row, Run, arguments, bars, console, interleave, ratio
from harness import spread as spread_of

# isort: split
from chromium import Chromium, find_chromium  # in tests/, which the harness puts on the path

MODEL = """
import torch
from transformers import BertConfig, BertModel


def make():
    return BertModel(BertConfig(num_hidden_layers={layers})), (torch.randint(1000, (2, 64)),)
"""
EXPORT = """
import torch
from model import make

model, args = make()
torch.export.export(model.eval(), args, strict=False)
"""
PEER = "torch.export"


class Command:
    """A command that runs in a folder: its wall-clock seconds, and its CPU seconds."""

    def __init__(self, command: Sequence[str], folder: Path, threads: int) -> None:
        self.command, self.folder = command, folder
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.cpu: list[float] = []

    def __call__(self) -> float:
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(self.command, cwd=self.folder, capture_output=True, text=True, env=self.environment)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"{' '.join(self.command[1:4])}: {said[-1]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return time.perf_counter() - start


def opened(page: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds until the page is drawn, and until all its modules are open."""
    drawn, whole = [], []
    with Chromium() as browser:
        for _ in range(rounds):
            drawn.append(browser.open(page))
            start = time.perf_counter()
            browser.run("document.getElementById('open').click()")
            whole.append(time.perf_counter() - start)
        if browser.errors:
            raise RuntimeError(f"the page has errors: {browser.errors}")
    return drawn, whole


def measure(args: argparse.Namespace, run: Run) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.py").write_text(MODEL.format(layers=args.layers))
        commands = {PEER: Command([sys.executable, "-c", EXPORT], folder, args.threads)}
        for graph in args.graph:
            dump = [sys.executable, "-m", "amp_compiler", "dump", "model.py:make", "--graph", graph]
            page = ["--format", "html", "-o", f"{graph}.html"]
            commands[graph] = Command([*dump, *page], folder, args.threads)
        cases: dict[str, Callable[[], float]] = dict(commands)
        with console.status("dumping"):
            samples = interleave(cases, args.rounds)
        reference: dict[str, str | int] = {"graph": PEER, "layers": args.layers}
        for graph, seconds in samples.items():
            row = Row({**reference, "graph": graph}, samples={"seconds": seconds, "cpu_seconds": commands[graph].cpu})
            if graph != PEER:
                row.reference = reference
                page_file = folder / f"{graph}.html"
                row.figures["page_bytes"] = page_file.stat().st_size
                if find_chromium() is not None:
                    row.samples["drawn"], row.samples["opened"] = opened(page_file, args.rounds)
            run.add(row)


def show(run: Run, rounds: int) -> None:
    peer = run.rows[0].samples

    def shown(row: Row, name: str) -> str:
        if name not in row.samples:
            return "–" if row.key["graph"] == PEER else "no Chromium"
        found = spread_of(row.samples[name])
        return f"{found.median:.1f} ({found.low:.1f} to {found.high:.1f})"

    run.table(
        f"Median of {rounds} (range), seconds, whole processes",
        ["graph", "on the clock", "CPU", "CPU / torch.export's", "page, MB", "drawn", "all opened"],
        [
            (row.key["graph"], shown(row, "seconds"), shown(row, "cpu_seconds"),
             "" if row.reference is None else ratio(row.samples["cpu_seconds"], peer["cpu_seconds"]),
             "–" if row.reference is None else f"{row.figures['page_bytes'] / 1e6:.2f}",
             shown(row, "drawn"), shown(row, "opened"))
            for row in run.rows
        ],
    )  # fmt: skip
    dumped = [row for row in run.rows if row.reference is not None]
    if any(spread_of(r.samples["cpu_seconds"]).median > 20 or r.figures["page_bytes"] > 3e6 for r in dumped):
        console.print("Over the aim of 20 s or 3 MB.")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--layers", type=int, default=12)
    made.add_argument("--graph", nargs="+", default=["inference", "joint"], choices=["forward", "inference", "joint"])
    return arguments(made, rounds=3, threads=1)


def main() -> int:
    args = parser().parse_args()
    run = Run("dump", f"A BERT of {args.layers} layers as an HTML page", args)
    measure(args, run)
    show(run, args.rounds)

    def plot(path: Path) -> None:
        peer = run.rows[0].samples["cpu_seconds"]
        dumped: dict[str, Ratio | float] = {
            str(row.key["graph"]): ratio(row.samples["cpu_seconds"], peer) for row in run.rows[1:]
        }
        title = f"amp-compiler dump of a BERT of {args.layers} layers"
        bars(path, title, {"dump": dumped}, "× torch.export alone, seconds on the processors")

    return run.finish(plot)


if __name__ == "__main__":
    sys.exit(main())
