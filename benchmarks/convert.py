"""Converting a model for inference: how long it takes, what memory it needs, and how fast the result runs on this CPU.

*Conversion* of a BERT-like encoder of 110 million parameters (12 layers of 768), in fresh processes: time beside plain
`torch.export.export` of the same model, in turns; and the peak of the process's memory beyond what it had, beside
the bytes of the converted weights and of the largest weight. *Inference* of the 4-layer encoder of the tests, batch
8 x 64: fp32 eager, `torch.autocast`, `model.to(dtype)`, converted with and without fp32 copies of weights, in turns.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import DTYPES, BertLike, console, interleave, print_header, print_table, sampled, spread, write_results
from torch import nn

from amp_compiler import convert_model

LARGE = {"layers": 12, "hidden": 768, "heads": 12, "intermediate": 3072, "vocab": 30522, "seq": 512}


def large() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return BertLike(**LARGE).eval(), (torch.randint(1000, (2, 64)),)


# -------------------------------------------------------------------------------------------- in a fresh process


def resident(field: str) -> int:
    """A line of the process's own record, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def memory(dtype: torch.dtype) -> dict[str, int]:
    model, args = large()
    small = BertLike(layers=1, hidden=8, heads=1, intermediate=8, vocab=8, seq=8).eval()
    convert_model(small, (torch.zeros(1, 8, dtype=torch.long),), dtype=dtype)  # what is imported and set up once
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is that of now
    before = resident("VmRSS")
    converted = convert_model(model, args, dtype=dtype)
    peak = resident("VmHWM") - before
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    return {"peak": peak, "weights": converted.details.stored_bytes, "fp32": converted.details.fp32_bytes,
            "largest": largest}  # fmt: skip


def in_fresh_process(dtype: str) -> dict[str, int]:
    command = [sys.executable, __file__, "--memory-of", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


# ----------------------------------------------------------------------------------------------------- timing


def timed(run: Callable[[], object]) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return sample


def inference(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    model, ids = BertLike().eval(), torch.randint(1000, (8, 64))
    low = copy.deepcopy(model).to(dtype)
    converted, plain = (convert_model(model, (ids,), dtype=dtype) for _ in range(2))
    plain.cache_weights = False

    def cast() -> object:
        with torch.autocast("cpu", dtype):
            return model(ids)

    runs: dict[str, Callable[[], object]] = {
        "fp32": lambda: model(ids), "autocast": cast, "model.to": lambda: low(ids), "converted": lambda: converted(ids),
        "no copies": lambda: plain(ids),
    }  # fmt: skip
    return {name: torch.inference_mode()(run) for name, run in runs.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--export-rounds", type=int, default=3)
    parser.add_argument("--memory-of", choices=DTYPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        print(json.dumps(memory(DTYPES[args.memory_of])))
        return 0
    facts = print_header("Conversion for inference")
    records: list[dict[str, object]] = []

    table: list[list[object]] = []
    for dtype in args.dtype:
        with console.status(f"memory, {dtype}"):
            found = in_fresh_process(dtype)
        bound = 1.1 * found["weights"] + found["largest"]
        table.append([dtype, *(f"{found[k] / 1e6:,.0f}" for k in ("fp32", "weights", "largest", "peak")),
                      f"{found['peak'] / bound:.2f}"])  # fmt: skip
        records.append({"what": "memory", "dtype": dtype, **found, "bound": bound})
    columns = ["MB", "fp32 weights", "converted", "largest", "peak extra", "peak / (1.1 converted + largest)"]
    print_table("Memory of converting 110 million parameters", columns, table)

    model, example = large()
    cases: dict[str, Callable[[], float]] = {"torch.export": timed(lambda: torch.export.export(model, example))}
    for dtype in args.dtype:
        cases[dtype] = timed(lambda dtype=dtype: convert_model(model, example, dtype=DTYPES[dtype]))
    with console.status("time of conversion"):
        for case in cases.values():
            case()
        samples = interleave(cases, args.export_rounds)
    peer = statistics.median(samples["torch.export"])
    rows = [[name, spread(taken), f"{statistics.median(taken) / peer:.2f}"] for name, taken in samples.items()]
    print_table("Time of converting it", ["", "ms", "/ torch.export"], rows)
    records += [{"what": "time", "variant": n, "seconds": statistics.median(t)} for n, t in samples.items()]

    table = []
    for dtype in args.dtype:
        with console.status(f"inference, {dtype}"):
            samples = interleave({k: sampled(run) for k, run in inference(DTYPES[dtype]).items()}, args.rounds)
        fp32 = statistics.median(samples["fp32"])
        table += [[dtype, name, spread(t), f"{statistics.median(t) / fp32:.2f}"] for name, t in samples.items()]
        records += [
            {"what": "inference", "dtype": dtype, "variant": name, "seconds": statistics.median(t),
             "fp32_ratio": statistics.median(t) / fp32} for name, t in samples.items()
        ]  # fmt: skip
    print_table("Inference, 4 layers of 128, batch 8 x 64", ["", "", "ms", "/ fp32"], table)
    write_results("convert", facts, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
