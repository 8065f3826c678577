"""Searching for the ops that fp16 breaks: how many evaluations it takes, and how many ops end up in fp32.

The networks have about 200 ops, of which one to five are planted faults (`tests/planted.py`): activations of 1e6, a
cancellation, weights that nearly cancel. A policy is good if the output's relative error is at most 0.02. The columns:

- `calibrated`, `no calibration`: `search_policy`.
- `onnxconverter-common`: the same network, exported to ONNX and given to `auto_convert_mixed_precision` of that
  package, with that criterion. Only what runs a trial differs from the package: ONNX's reference evaluator, which
  rounds the result of every fp16 node. By ONNX Runtime, as the package does it, fp16 is not tested on a CPU: it has few
  fp16 kernels there and computes neighbouring nodes in fp32 without rounding between them.
- `by ONNX Runtime`: the package as it is. `wrong` counts 1 if the file that it returns does not meet
  the criterion when every fp16 node rounds.
- `ModelOpt AutoCast`: NVIDIA's rule without trials: nodes that reach 512 in one fp32 run stay in fp32. It runs here if
  it is installed without what it needs for GPUs: `pip install --no-deps nvidia-modelopt onnx-graphsurgeon polygraphy
  onnxslim lief cppimport omegaconf pulp antlr4-python3-runtime nvidia-ml-py mako`.
- `its halving`: onnxconverter-common's own code chooses what to try, and each of its trials is the same network with
  the same ops low, run by `amp_compile`. This is the algorithm alone, also where the package's conversion fails: it
  stores all weights in fp16, so that keeping a node in fp32 does not save it from the rounding of its weights.

With `--gradients`, the faults are gradients of 1e-9 and the criterion is the error of the weights' gradients, at
most 0.1. The peer has no such thing. `weights` is left out there: it needs one op more
in fp32 then, the `tanh` in front of its product, whose gradient is a sum that cancels (`tests/planted.py`).

Every evaluation is counted, also those of the fp32 model and of the last check.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from amp_compiler import Policy, Search, amp_compile, calibrate, search_policy
from amp_compiler.calibration.items import find_work, policy_for
from harness import Row, Run, arguments, console

# isort: split
# Of tests/, which the harness puts on the path.
from planted import Planted, expected, gradient_error, planted, relative_error, small_loss

TOLERANCE, GRADIENT_TOLERANCE = 0.02, 0.1
PEER = "onnxconverter-common"
#: number of ops that must stay in fp32 -> the kinds of faults
PLANTED = {
    1: ("weights",), 2: ("activations",), 3: ("plateau",), 4: ("activations", "cancellation"),
    5: ("plateau", "cancellation"),
}  # fmt: skip
#: the same for gradients
WITH_GRADIENTS = {2: ("gradients",), 3: ("quotient", "gradients"), 4: ("gradients", "activations"),
                  5: ("gradients", "plateau")}  # fmt: skip
_FLOAT16 = 10  # onnx.TensorProto.FLOAT16


class PeerError(Exception):
    """The peer's package gives up."""


def network(ops: int, faults: int) -> tuple[Planted, torch.Tensor, set[str]]:
    """A network, its data, and the ops that must stay in fp32."""
    model, places = planted(ops, PLANTED[faults])
    torch.manual_seed(1)
    return model, torch.randn(32, 16), expected(places)


def ours(ops: int, faults: int, *, calibrated: bool) -> dict[str, int]:
    model, x, wanted = network(ops, faults)
    known = calibrate(model, [(x, None)]) if calibrated else None
    found = search_policy(
        model, relative_error(model, x), tolerance=TOLERANCE, maximize=False, calibration=known, budget=200
    )
    return counts(found, wanted)


def gradients(ops: int, faults: int, *, calibrated: bool) -> dict[str, int]:
    model, places = planted(ops, WITH_GRADIENTS[faults])
    torch.manual_seed(1)
    x, wanted = torch.randn(32, 16), expected(places)
    known = calibrate(model, [(x, None)], small_loss, scale=1.0) if calibrated else None
    found = search_policy(model, gradient_error(model, x), tolerance=GRADIENT_TOLERANCE, maximize=False,
                          calibration=known, budget=200)  # fmt: skip
    return counts(found, wanted)


def counts(found: Search, wanted: set[str]) -> dict[str, int]:
    kept = {name for name, _ in found.reasons}
    return {"evaluations": found.evaluations, "fp32": len(kept), "too_many": len(kept - wanted),
            "missed": len(wanted - kept), "ops": len(found.items)}  # fmt: skip


def peer(ops: int, faults: int, *, rounds: bool) -> dict[str, int]:
    """Run the peer on the exported network. `rounds`: its trials by ONNX's reference evaluator, not by ONNX Runtime."""
    from onnxconverter_common import auto_mixed_precision as package

    given_to = Exported(ops, faults)
    by_package, calls = package.get_tensor_values_using_ort, [0]

    def values(given: Any, inputs: Any, output_names: Any = None, options: Any = None) -> Any:
        calls[0] += output_names is None  # with names, it asks for dtypes
        own = rounds and output_names is None
        return given_to.run(given) if own else by_package(given, inputs, output_names, options)

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch.object(package, "get_tensor_values_using_ort", values):
            try:
                made = package.auto_convert_mixed_precision(
                    given_to.graph, given_to.feed, lambda a, b: error(a, b) <= TOLERANCE, keep_io_types=True
                )
            except ValueError as failure:
                raise PeerError(f"failed after {calls[0]} evaluations: {failure}") from failure
    return given_to.counts(made, calls[0])


def modelopt(ops: int, faults: int) -> dict[str, int]:
    """Run ModelOpt's AutoCast on the exported network. It runs the network once, in fp32."""
    import numpy as np
    import onnx
    from modelopt.onnx.autocast import convert_to_mixed_precision

    given_to = Exported(ops, faults)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        onnx.save(given_to.graph, f"{folder}/network.onnx")
        np.savez(f"{folder}/data.npz", **given_to.feed)
        made = convert_to_mixed_precision(
            f"{folder}/network.onnx", "fp16", keep_io_types=True, calibration_data=f"{folder}/data.npz"
        )
    return given_to.counts(made, 1)


class Exported:
    """A network with faults as an ONNX graph, and its data."""

    def __init__(self, ops: int, faults: int) -> None:
        model, x, self.wanted = network(ops, faults)
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()):
            program = torch.onnx.export(model, (x,), dynamo=True, optimize=False, verbose=False)
        assert program is not None
        self.graph = program.model_proto
        self.feed = {self.graph.graph.input[0].name: x.numpy()}

    def run(self, graph: Any) -> list[Any]:
        """The outputs of a graph, by an evaluator that rounds the result of every fp16 node."""
        import numpy as np
        from onnx.reference import ReferenceEvaluator

        with np.errstate(all="ignore"):
            return list(ReferenceEvaluator(graph).run(None, self.feed))

    def counts(self, made: Any, evaluations: int) -> dict[str, int]:
        """What a peer made of it: nodes in fp32, and whether it meets the criterion."""
        import onnx

        typed = onnx.shape_inference.infer_shapes(made).graph
        low = {v.name for v in (*typed.value_info, *typed.output) if v.type.tensor_type.elem_type == _FLOAT16}
        nodes = [n for n in typed.node if n.op_type not in ("Cast", "Constant")]
        kept = sum(n.output[0] not in low for n in nodes)
        return {"evaluations": evaluations, "fp32": kept, "too_many": max(kept - len(self.wanted), 0),
                "missed": max(len(self.wanted) - kept, 0), "ops": len(nodes),
                "wrong": int(not error(self.run(self.graph), self.run(made)) <= TOLERANCE)}  # fmt: skip


def error(a: list[Any], b: list[Any]) -> float:
    wanted = a[0].astype("float64")
    return float(((wanted - b[0]) ** 2).sum() ** 0.5 / (wanted**2).sum() ** 0.5)


def halving(ops: int, faults: int) -> dict[str, int]:
    """Run the peer's search with its own code. Its nodes are our ops, and what it would do with ONNX Runtime,
    converting all nodes but those on a list and running the result, is done by `amp_compile`."""
    import numpy as np
    import onnx
    from onnxconverter_common import auto_mixed_precision as package

    model, x, wanted = network(ops, faults)
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
    return {"evaluations": calls[0], "fp32": len(kept), "too_many": len(kept - wanted), "missed": len(wanted - kept),
            "ops": len(items)}  # fmt: skip


VARIANTS: dict[str, Callable[[int, int], dict[str, int]]] = {
    "calibrated": lambda ops, faults: ours(ops, faults, calibrated=True),
    "no calibration": lambda ops, faults: ours(ops, faults, calibrated=False),
    PEER: lambda ops, faults: peer(ops, faults, rounds=True),
    "by ONNX Runtime": lambda ops, faults: peer(ops, faults, rounds=False),
    "ModelOpt AutoCast": modelopt,
    "its halving": halving,
}
GRADIENTS: dict[str, Callable[[int, int], dict[str, int]]] = {
    "calibrated": lambda ops, faults: gradients(ops, faults, calibrated=True),
    "no calibration": lambda ops, faults: gradients(ops, faults, calibrated=False),
}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--ops", type=int, default=200, help="of the networks")
    found.add_argument("--faults", type=int, nargs="+", choices=PLANTED, default=list(PLANTED))
    found.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    found.add_argument("--gradients", action="store_true", help="faults in gradients; ours alone")
    return arguments(found)


def counted(ops: int, faults: int, variant: str, run: Callable[[int, int], dict[str, int]]) -> Row:
    row = Row({"ops": ops, "faults": faults, "variant": variant})
    package = "modelopt" if variant == "ModelOpt AutoCast" else "onnxconverter_common"
    if variant not in GRADIENTS and importlib.util.find_spec(package) is None:
        row.failed, row.note = True, f"{package} is not installed"
        return row
    start = time.perf_counter()
    try:
        row.counts = run(ops, faults)
    except PeerError as error:
        row.failed, row.note = True, str(error)
    except Exception as error:  # if one fails, in whatever way, the others are still counted
        lines = str(error).strip().splitlines()
        row.failed, row.note = True, f"{type(error).__name__}: {lines[0] if lines else ''}"
    row.figures["seconds"] = time.perf_counter() - start
    return row


def cell(row: Row) -> str:
    if row.failed:
        return row.note.partition(":")[0] if row.note.startswith("failed") else "failed"
    wrong = ", wrong" if row.counts.get("wrong") else ""
    return f"{row.counts['evaluations']}  {row.counts['fp32']} of {row.counts['ops']}{wrong}"


def main() -> int:
    args = parser().parse_args()
    run = Run("search", "Searching for planted faults", args)
    table = []
    variants = GRADIENTS if args.gradients else {name: VARIANTS[name] for name in args.variants}
    for faults in args.faults if not args.gradients else WITH_GRADIENTS:
        rows = []
        for variant, search in variants.items():
            with console.status(f"{faults} faults, {variant}"):
                rows.append(counted(args.ops, faults, variant, search))
        run.rows += rows
        table.append([f"{faults}", *map(cell, rows)])
    run.table(f"{args.ops} ops in fp16: evaluations, ops in fp32", ["faults", *variants], table)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
