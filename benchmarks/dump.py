"""`amp-compiler dump --format html` of a BERT: how long it takes, how large the page is, how fast a browser opens it.

A process of its own, started as a user does, imports of torch and transformers included. The peer in the same run is
what everything before our part costs: the same process with the model made and `torch.export.export` called on it.
The page is opened in headless Chromium, where there is one; the time is until it says that it is drawn.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import console, print_header, print_table, write_results

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from chromium import Chromium, find_chromium

MODEL = """
import torch
from transformers import BertConfig, BertModel


def make():
    return BertModel(BertConfig(num_hidden_layers={layers})), (torch.randint(1000, (2, 64)),)
"""
PEER = """
import torch
from model import make

model, args = make()
torch.export.export(model.eval(), args, strict=False)
"""


def measured(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds on the clock and on the processors; the second is what a machine without other work would need."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, spent


def opened(page: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds until the page is drawn, and until all its modules are open."""
    drawn, whole = [], []
    with Chromium() as browser:
        for _ in range(rounds):
            drawn.append(browser.open(page))
            start = time.perf_counter()
            browser.run("document.getElementById('open').click()")
            whole.append(time.perf_counter() - start)
        assert browser.errors == [], browser.errors
    return drawn, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--graph", nargs="+", default=["inference", "joint"], choices=["forward", "inference", "joint"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    facts = print_header(f"A BERT of {args.layers} layers as an HTML page")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.py").write_text(MODEL.format(layers=args.layers))
        times: dict[str, list[tuple[float, float]]] = {graph: [] for graph in args.graph}
        peer: list[tuple[float, float]] = []
        for _ in range(args.rounds):
            peer.append(measured([sys.executable, "-c", PEER], folder))
            for graph in args.graph:
                command = [sys.executable, "-m", "amp_compiler", "dump", "model.py:make", "--graph", graph]
                times[graph].append(measured([*command, "--format", "html", "-o", f"{graph}.html"], folder))
        for graph in args.graph:
            page = folder / f"{graph}.html"
            row = {
                "graph": graph, "bytes": page.stat().st_size,
                "seconds": [clock for clock, _ in times[graph]], "cpu_seconds": [spent for _, spent in times[graph]],
                "export_alone": [clock for clock, _ in peer], "export_alone_cpu": [spent for _, spent in peer],
            }  # fmt: skip
            if find_chromium() is not None:
                row["drawn"], row["whole"] = opened(page, args.rounds)
            rows.append(row)
    columns = ["graph", "dump, s", "CPU, s", "torch.export alone, s", "CPU, s", "page, MB", "drawn, s", "all opened, s"]

    def shown(row: dict[str, object], key: str) -> str:
        found = row.get(key)
        if not isinstance(found, list):
            return "no Chromium"
        return f"{statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f})"

    keys = ("seconds", "cpu_seconds", "export_alone", "export_alone_cpu")
    print_table(
        f"Median of {args.rounds} (range), whole processes", columns,
        [(r["graph"], *(shown(r, k) for k in keys), f"{r['bytes'] / 1e6:.2f}", shown(r, "drawn"), shown(r, "whole"))
         for r in rows],
    )  # fmt: skip
    if any(statistics.median(r["cpu_seconds"]) > 20 or r["bytes"] > 3e6 for r in rows):
        console.print("Over the aim of 20 s or 3 MB.")
    write_results("dump", facts, rows)


if __name__ == "__main__":
    main()
