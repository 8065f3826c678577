"""Searching for the ops that fp16 breaks: how many evaluations it takes, and how many ops end up in fp32.

The networks have 200 ops, of which one to five are planted faults: activations of 1e6, a cancellation, a quotient of
numbers that fp16 cannot hold (`tests/planted.py`). Ours is `search_policy`, with a calibration and without one. The
peer is `auto_convert_mixed_precision` of onnxconverter-common (`pip install onnxconverter-common`), on the same network as
an ONNX model, with the same data and the same bound on the error; its evaluations are runs of ONNX Runtime. What it counts as
ops are ONNX nodes. Every evaluation is counted, also those of the fp32 model and of the last check.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from amp_compiler import calibrate, search_policy
from harness import Row, Run, arguments, console

# isort: split
from planted import FAULTS, Planted, expected, relative_error  # in tests/, which the harness puts on the path

TOLERANCE = 0.02
PEER = "onnxconverter-common"
#: number of ops that must stay in fp32 -> the kinds of faults
PLANTED = {
    1: ("quotient",), 2: ("activations",), 3: ("quotient", "cancellation"), 4: ("activations", "cancellation"),
    5: ("quotient", "activations", "cancellation"),
}  # fmt: skip


def network(ops: int, faults: int) -> tuple[Planted, torch.Tensor, set[str]]:
    """A network, its data, and the ops that must stay in fp32."""
    kinds = PLANTED[faults]
    blocks = (ops - sum(len(FAULTS[kind]) for kind in kinds)) // 4
    places = {blocks * (number + 1) // (len(kinds) + 1): kind for number, kind in enumerate(kinds)}
    model = Planted(blocks, places).eval()
    torch.manual_seed(1)
    return model, torch.randn(32, 16), expected(places)


def ours(ops: int, faults: int, *, calibrated: bool) -> dict[str, int]:
    model, x, planted = network(ops, faults)
    known = calibrate(model, [(x, None)]) if calibrated else None
    found = search_policy(
        model, relative_error(model, x), tolerance=TOLERANCE, maximize=False, calibration=known, budget=200
    )
    kept = {name for name, _ in found.reasons}
    return {"evaluations": found.evaluations, "fp32": len(kept), "too_many": len(kept - planted),
            "missed": len(planted - kept), "ops": len(found.items)}  # fmt: skip


def peer(ops: int, faults: int) -> dict[str, int]:
    import numpy as np
    import onnx
    from onnxconverter_common import auto_mixed_precision

    model, x, _ = network(ops, faults)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = str(Path(folder, "model.onnx"))
        torch.onnx.export(model, (x,), path, dynamo=True, optimize=False, input_names=["x"])
        exported = onnx.load(path)
    calls = [0]

    def validate(wanted: Sequence[np.ndarray], given: Sequence[np.ndarray]) -> bool:
        calls[0] += 1
        error = np.linalg.norm(given[0].astype(np.float64) - wanted[0]) / np.linalg.norm(wanted[0])
        return bool(error <= TOLERANCE)

    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto_mixed_precision.auto_convert_mixed_precision(exported, {"x": x.numpy()}, validate, keep_io_types=True)
    last = [line for line in said.getvalue().splitlines() if line.startswith("Done:")][-1]
    return {"evaluations": calls[0], "fp32": len(re.findall(r"'[^']*'", last)), "ops": len(exported.graph.node)}


VARIANTS: dict[str, Callable[[int, int], dict[str, int]]] = {
    "calibrated": lambda ops, faults: ours(ops, faults, calibrated=True),
    "no calibration": lambda ops, faults: ours(ops, faults, calibrated=False),
    PEER: peer,
}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--ops", type=int, default=200, help="of the networks")
    found.add_argument("--faults", type=int, nargs="+", choices=PLANTED, default=list(PLANTED))
    found.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    return arguments(found)


def counted(ops: int, faults: int, variant: str) -> Row:
    row = Row({"ops": ops, "faults": faults, "variant": variant})
    if variant == PEER and importlib.util.find_spec("onnxconverter_common") is None:
        row.failed, row.note = True, "onnxconverter-common is not installed"
        return row
    start = time.perf_counter()
    try:
        row.counts = VARIANTS[variant](ops, faults)
    except Exception as error:  # if one fails, in whatever way, the others are still counted
        lines = str(error).strip().splitlines()
        row.failed, row.note = True, f"{type(error).__name__}: {lines[0] if lines else ''}"
    row.figures["seconds"] = time.perf_counter() - start
    return row


def cell(row: Row) -> str:
    if row.failed:
        return "failed"
    return f"{row.counts['evaluations']}  {row.counts['fp32']} of {row.counts['ops']}"


def main() -> int:
    args = parser().parse_args()
    run = Run("search", "Searching for planted faults", args)
    table = []
    for faults in args.faults:
        rows = []
        for variant in args.variants:
            with console.status(f"{faults} faults, {variant}"):
                rows.append(counted(args.ops, faults, variant))
        run.rows += rows
        table.append([f"{faults}", *map(cell, rows)])
    run.table(f"{args.ops} ops in fp16: evaluations, ops in fp32", ["faults", *args.variants], table)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
