"""Searching for the ops that fp16 breaks: how many evaluations it takes, and how many ops end up in fp32.

The networks have 200 ops, of which one to five are planted faults: activations of 1e6, a cancellation, weights that
nearly cancel (`tests/planted.py`). Ours is `search_policy`, with a calibration and without one. The peer is
`auto_convert_mixed_precision` of onnxconverter-common (`pip install onnxconverter-common`): its own code chooses what
to try, and each of its trials is the same network with the same ops low, run by `amp_compile` and judged by the same
error. (Its own trials, by ONNX Runtime, were not comparable on a CPU: activations of 1e6 passed there, and a network
with weights of 1e6 failed with every node kept in fp32.) Every evaluation is counted, also those of the fp32 model and
of the last check.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from amp_compiler import Policy, amp_compile, calibrate, search_policy
from amp_compiler.calibration.items import find_work, policy_for
from harness import Row, Run, arguments, console

# isort: split
from planted import FAULTS, Planted, expected, relative_error  # in tests/, which the harness puts on the path

TOLERANCE = 0.02
PEER = "onnxconverter-common"
#: number of ops that must stay in fp32 -> the kinds of faults
PLANTED = {
    1: ("weights",), 2: ("activations",), 3: ("weights", "cancellation"), 4: ("activations", "cancellation"),
    5: ("weights", "activations", "cancellation"),
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
    """Run the peer's search with its own code. Its nodes are our ops, and what it would do with ONNX Runtime,
    converting all nodes but those on a list and running the result, is done by `amp_compile`."""
    import numpy as np
    import onnx
    from onnxconverter_common import auto_mixed_precision as package

    model, x, planted = network(ops, faults)
    compiled = amp_compile(model, level="O3", dtype=torch.float16)
    with torch.no_grad():
        compiled(x)
    items = {item.name: item for item in find_work(compiled.graphs, "flops").items}
    evaluate, policy = relative_error(model, x), Policy("O3", torch.float16)
    nodes = [onnx.helper.make_node("Identity", [name], [f"{name}."], name=name) for name in items]
    graph = onnx.helper.make_model(onnx.helper.make_graph(nodes, "ops", [], []))
    calls, kept = [0], set(items)

    def convert(model: Any, node_block_list: Sequence[str], **options: Any) -> set[str]:
        return set(node_block_list)

    def values(given: Any, feed: Any) -> list[float]:
        calls[0] += 1
        if not isinstance(given, set):
            return [0.0]
        kept.clear()
        kept.update(given)
        return [evaluate(amp_compile(model, policy=policy_for(policy, [items[name] for name in given])))]

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for owner, name, own in (
            (package.float16, "convert_float_to_float16", convert), (package, "get_tensor_values_using_ort", values),
            (package, "add_missing_dtypes_using_ort", lambda given, feed: given),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, own))
        package.auto_convert_mixed_precision(
            graph, {"x": np.zeros(1)}, lambda wanted, given: given[0] <= TOLERANCE, keep_io_types=True
        )
    return {"evaluations": calls[0], "fp32": len(kept), "too_many": len(kept - planted), "missed": len(planted - kept),
            "ops": len(items)}  # fmt: skip


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
