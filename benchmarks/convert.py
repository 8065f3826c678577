"""Converting a model for inference: how long it takes, what memory it needs, and how fast the result runs on this CPU.

*Conversion* of a BERT-like encoder of 110 million parameters (12 layers of 768): the time, interleaved with plain
`torch.export.export` of the same model; and, in a fresh process, the peak of the additional memory, compared with the
bytes of the converted weights and of the largest weight. *Inference* of the 4-layer encoder of the tests, batch 8 x 64,
interleaved: fp32 eager, `torch.autocast`, `model.to(dtype)`, converted with and without fp32 copies of weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from amp_compiler import convert_model
from harness import (
    DTYPES,
    Ratio,
    Row,
    Run,
    arguments,
    bars,
    console,
    in_fresh_process,
    interleave,
    peak_resident,
    ratio,
    sampled,
    set_threads,
    spread,
)
from networks import BertLike

#: layers, hidden, heads, intermediate, vocabulary, longest sequence
SIZES = {"110 million": (12, 768, 12, 3072, 30522, 512), "tiny": (2, 32, 2, 64, 100, 64)}


def encoder(size: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    layers, hidden, heads, intermediate, vocabulary, longest = SIZES[size]
    model = BertLike(layers, hidden, heads, intermediate, vocabulary, longest).eval()
    return model, (torch.randint(min(1000, vocabulary), (2, 64)),)


def memory(size: str, dtype: torch.dtype) -> dict[str, int]:
    """In a fresh process: the memory that converting needs in addition to the model, and the bytes of the result."""
    model, args = encoder(size)
    small = BertLike(layers=1, hidden=8, heads=1, intermediate=8, vocab=8, seq=8).eval()
    convert_model(small, (torch.zeros(1, 8, dtype=torch.long),), dtype=dtype)  # what is imported and set up once
    made = []
    peak = peak_resident(lambda: made.append(convert_model(model, args, dtype=dtype)))
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    details = made[0].details
    return {"peak": peak, "converted_bytes": details.stored_bytes, "fp32_bytes": details.fp32_bytes,
            "largest_bytes": largest}  # fmt: skip


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


def measure_memory(args: argparse.Namespace, run: Run) -> None:
    table: list[list[object]] = []
    for dtype in args.dtypes:
        with console.status(f"memory, {dtype}"):
            found = in_fresh_process(__file__, ["--memory-of", dtype, "--size", args.size, "--threads", "1"])
        peak = found.pop("peak")
        bound = 1.1 * found["converted_bytes"] + found["largest_bytes"]
        table.append([dtype, *(f"{found[k] / 1e6:,.0f}" for k in ("fp32_bytes", "converted_bytes", "largest_bytes")),
                      f"{peak / 1e6:,.0f}", f"{peak / bound:.2f}"])  # fmt: skip
        key: dict[str, str | int] = {"what": "memory", "dtype": dtype, "variant": "converted"}
        run.add(Row(key, found, figures={"peak_resident": peak, "of_bound": peak / bound}))
    columns = ["MB", "fp32 weights", "converted", "largest", "peak extra", "peak / (1.1 converted + largest)"]
    run.table(f"Memory of converting the encoder ({args.size} parameters)", columns, table)


def measure_conversion(args: argparse.Namespace, run: Run) -> None:
    model, example = encoder(args.size)
    cases: dict[str, Callable[[], float]] = {"torch.export": timed(lambda: torch.export.export(model, example))}
    for dtype in args.dtypes:
        cases[dtype] = timed(partial(convert_model, model, example, dtype=DTYPES[dtype]))
    with console.status("time of conversion"):
        for case in cases.values():
            case()
        samples = interleave(cases, args.export_rounds)
    peer: dict[str, str | int] = {"what": "conversion", "dtype": "float32", "variant": "torch.export"}
    rows = []
    for name, taken in samples.items():
        key = peer if name == "torch.export" else {"what": "conversion", "dtype": name, "variant": "convert_model"}
        run.add(Row(dict(key), samples={"seconds": taken}, reference=None if key is peer else peer))
        rows.append([name, spread(taken), "" if key is peer else ratio(taken, samples["torch.export"])])
    run.table("Time of converting it", ["", "ms: median (range)", "/ torch.export"], rows)


def measure_inference(args: argparse.Namespace, run: Run) -> dict[str, dict[str, Ratio | float]]:
    table: list[list[object]] = []
    drawn: dict[str, dict[str, Ratio | float]] = {}
    for dtype in args.dtypes:
        with console.status(f"inference, {dtype}"):
            samples = interleave({k: sampled(one) for k, one in inference(DTYPES[dtype]).items()}, args.rounds)
        reference: dict[str, str | int] = {"what": "inference", "dtype": dtype, "variant": "fp32"}
        for name, taken in samples.items():
            key = {**reference, "variant": name}
            run.add(Row(key, samples={"seconds": taken}, reference=None if key == reference else reference))
            divided = None if key == reference else ratio(taken, samples["fp32"])
            table.append([f"{dtype}, {name}", spread(taken), divided or ""])
            if divided is not None:
                drawn.setdefault(dtype, {})[name] = divided
    run.table("Inference, 4 layers of 128, batch 8 x 64", ["", "ms: median (range)", "/ fp32"], table)
    return drawn


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    made.add_argument("--size", choices=SIZES, default="110 million", help="of the model that is converted")
    made.add_argument("--export-rounds", type=int, default=3)
    made.add_argument("--memory-of", choices=DTYPES, help=argparse.SUPPRESS)
    return arguments(made, rounds=9, threads=1)


def main() -> int:
    args = parser().parse_args()
    if args.memory_of:
        set_threads(args.threads)
        print(json.dumps(memory(args.size, DTYPES[args.memory_of])))
        return 0
    run = Run("convert", "Conversion for inference", args)
    measure_memory(args, run)
    measure_conversion(args, run)
    drawn = measure_inference(args, run)

    def plot(path: Path) -> None:
        bars(path, "Inference of a 4-layer encoder: time divided by fp32's", drawn, "× fp32, lower is better", log=True)

    return run.finish(plot)


if __name__ == "__main__":
    sys.exit(main())
