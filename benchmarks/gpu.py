"""The GPU kernels: without a GPU, what is compiled, computed and estimated; with one, times beside the peers'.

*Compiled*: every Triton kernel that we ship, in every tuning configuration, down to machine code for real GPUs:
tensor-core instructions, registers, spills, shared memory, loads of 16 bytes, size. The peer in the same table is the
same product with operands that were cast before: what rounding inside of the kernel costs in registers and programs.

*Computed* from shapes: kernels launched and bytes read and written of one linear layer in a training step, ours (fp32
weights rounded as they are loaded, the weight's gradient written in fp32) beside casts before and after a product, as
autocast has it: the weight is cast once and its low copy read twice, the weight's gradient is written low and cast.
"least" counts every operand once, as if the L2 cache held it; "most" counts every load of every program of the
configuration that is chosen for the shape. Gradients checked and unscaled: launches and bytes of ours beside torch's
foreach kernel, whose limits (tensors and blocks a launch) are those of its source for CUDA 12 and 13.

*Estimated*: the forward of a layer by our kernel, from its machine code and the data sheet, and by a cast and the
library at its published rate: the choice that ``fuse_cast_matmul`` makes, what limits our kernel, and the tuning
configuration with its reason: the kernel takes the one that the estimate finds fastest.

*Timed*, on a GPU only: ``gpu_timed.py``. Everything goes into one result file, to send back.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpu_timed import timed

from harness import Row, Run, arguments, bars, console
from subjects import bert_base_shapes

if TYPE_CHECKING:
    from amp_compiler.kernels.check_cases import Case
    from amp_compiler.kernels.check_compile import Result

TARGETS = ("sm_80", "sm_90", "gfx942")
LOW, FP32 = 2, 4  # bytes
#: rows, inputs, outputs of a linear layer
LAYERS = {
    "BERT-base, attention, 16 x 512 tokens": (8192, 768, 768),
    "BERT-base, up, 16 x 512 tokens": (8192, 768, 3072),
    "BERT-base, down, 16 x 512 tokens": (8192, 3072, 768),
    "Paddle's nine layers, batch 2048": (2048, 8192, 8192),
    "Llama 7B, up, 1 x 2048 tokens": (2048, 4096, 11008),
    "Llama 7B, up, 16 tokens": (16, 4096, 11008),
}


# ------------------------------------------------------------------------------------------------------- compiled


def compiled(args: argparse.Namespace, run: Run) -> int:
    from amp_compiler.kernels.check_cases import cases
    from amp_compiler.kernels.check_compile import compile_case

    failures = 0
    for target in args.target:
        found: list[Result] = []
        for case in (chosen for chosen in cases(target, args.quick)):
            with console.status(f"{target}: {case.kernel.__name__}, {case.name}, {case.what}"):
                found.append(compile_case(case))
        if args.quick:
            found += [compile_case(case) for case in cast_before(target)]
        for result in found:
            run.add(_row(result))
        failures += sum(bool(result.problems) for result in found)
        run.table(
            f"{target}: compiled",
            ["kernel", "configuration", "operands", "tensor cores", "registers", "spills", "shared KiB", "occupancy",
             "16-byte loads", "KiB", ""],
            [_cells(result) for result in found],
        )  # fmt: skip
    return failures


def cast_before(target: str) -> Iterator[Case]:
    """The baseline of the first case: the same tile, with operands that are low already."""
    from amp_compiler.kernels.cast_matmul_configs import TARGETS as KINDS
    from amp_compiler.kernels.check_cases import PRODUCTS, matmul_case

    for product in PRODUCTS:
        if product.a == product.b == product.low == product.out:
            yield matmul_case(target, KINDS[target].configs[0], product)


def _row(result: Result) -> Row:
    case = result.case
    key: dict[str, str | int] = {
        "what": "compiled", "target": case.target, "kernel": case.kernel.__name__, "configuration": case.name,
        "operands": case.what,
    }  # fmt: skip
    counts = {
        "registers": result.registers, "spilled": result.spilled, "shared_bytes": result.shared,
        "binary_bytes": result.binary, "loads": result.loads[1],
    }  # fmt: skip
    figures = {
        "occupancy": result.occupancy, "wide_loads": float(result.loads[0]),
        "tensor_core_instructions": float(result.instructions),
    }  # fmt: skip
    return Row(key, counts, figures=figures, note="; ".join(result.problems), failed=bool(result.problems))


def _cells(result: Result) -> list[object]:
    case = result.case
    units = f"{result.instructions} {result.unit}" if result.unit else "–"
    return [
        case.kernel.__name__.removesuffix("_kernel"), case.name, case.what, units, result.registers, result.spilled,
        f"{result.shared / 1024:.0f}", f"{result.occupancy:.0%}", f"{result.loads[0]} of {result.loads[1]}",
        f"{result.binary / 1024:.0f}", "; ".join(result.problems) or "✓",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- computed


@dataclass(frozen=True)
class Traffic:
    """Kernels launched, and bytes that pass between memory and the GPU at least and at most."""

    kernels: int
    least: int
    most: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.kernels + other.kernels, self.least + other.least, self.most + other.most)


def cast(numbers: int, source: int, to: int) -> Traffic:
    """A kernel that reads numbers of `source` bytes and writes them in `to` bytes."""
    moved = numbers * (source + to)
    return Traffic(1, moved, moved)


def product(target: str, m: int, k: int, n: int, a: int, b: int, out: int, bias: int = 0) -> Traffic:
    """[m, k] @ [k, n] with operands of `a` and `b` bytes, in the configuration that is chosen for it.

    A program of the kernel loads its rows of `a` and its columns of `b`: `a` is loaded once for each column of tiles.
    With K split, fp32 partial sums are written and read once more by a second kernel.

    >>> product("sm_80", 128, 128, 128, 2, 2, 2).least == 3 * 128 * 128 * 2
    True
    """
    from amp_compiler.kernels.cast_matmul_estimate import Shape, choose

    config, pieces = choose(Shape(m, n, k), target)
    columns, rows = -(-n // config.block_n), -(-m // config.block_m)
    sums = 2 * pieces * m * n * FP32 if pieces > 1 else 0
    written = m * n * out + sums + n * bias
    return Traffic(2 if pieces > 1 else 1, m * k * a + k * n * b + written,
                   m * k * a * columns + k * n * b * rows + written)  # fmt: skip


def layer(target: str, m: int, k: int, n: int, fused: bool) -> dict[str, Traffic]:
    """A linear layer with low activations, fp32 weight and bias: forward, gradient of the input, of the weight.

    The bias's gradient is the same sum on both sides and left out.
    """
    weight = FP32 if fused else LOW
    forward = product(target, m, k, n, LOW, weight, LOW, bias=weight)
    gradient = product(target, n, m, k, LOW, LOW, FP32 if fused else LOW)
    if not fused:
        forward = cast(n * k, FP32, LOW) + cast(n, FP32, LOW) + forward
        gradient += cast(n * k, LOW, FP32)
    return {
        "forward": forward,
        "input's gradient": product(target, m, n, k, LOW, weight, LOW),
        "weight's gradient": gradient,
    }


def computed(args: argparse.Namespace, run: Run) -> dict[str, dict[str, float]]:
    drawn: dict[str, dict[str, float]] = {}
    for target in args.target:
        table: list[list[object]] = []
        for name, shape in LAYERS.items():
            ours, peer = (layer(target, *shape, fused=fused) for fused in (True, False))
            ours["all three"], peer["all three"] = (
                sum(parts.values(), Traffic(0, 0, 0)) for parts in (ours, peer)
            )  # fmt: skip
            for part in ours:
                own, other = ours[part], peer[part]
                for variant, one in (("ours", own), ("cast before", other)):
                    key: dict[str, str | int] = {
                        "what": "computed", "target": target, "layer": name, "part": part, "variant": variant
                    }  # fmt: skip
                    counts = {"kernels": one.kernels, "least_bytes": one.least, "most_bytes": one.most}
                    run.add(Row(key, counts))
                least, most = own.least / other.least, own.most / other.most
                table.append([
                    f"{name}: {part}", f"{own.kernels}, {other.kernels}", f"{own.least / 1e6:,.0f}",
                    f"{other.least / 1e6:,.0f}", f"{least:.2f}", f"{own.most / 1e6:,.0f}", f"{other.most / 1e6:,.0f}",
                    f"{most:.2f}",
                ])  # fmt: skip
            own, other = ours["all three"], peer["all three"]
            drawn.setdefault(name, {}).update({
                f"{target}, least": own.least / other.least, f"{target}, most": own.most / other.most
            })  # fmt: skip
        run.table(
            f"{target}: computed from shapes; ours beside cast before and after",
            ["", "kernels", "least MB", "peer's", "ratio", "most MB", "peer's", "ratio"],
            table,
        )
    return drawn


def roofline(args: argparse.Namespace, run: Run) -> None:
    """Estimated times of a layer's forward, who computes it, and why its configuration was chosen."""
    from amp_compiler.cost.fused import OF_TARGET, fused_estimate, library_seconds
    from amp_compiler.cost.products import Product
    from amp_compiler.kernels.cast_matmul_estimate import RATES

    for target in args.target:
        table: list[list[object]] = []
        reasons: dict[str, str] = {}
        for name, (m, k, n) in LAYERS.items():
            shape = Product(m, n, k, aligned=(n, k))
            ours, theirs = fused_estimate(shape, target, "right"), library_seconds(shape, target, k * n)
            for variant, seconds in (("ours", ours.seconds), ("cast before", theirs)):
                key: dict[str, str | int] = {"what": "estimated", "target": target, "layer": name, "variant": variant}
                figures = {"microseconds": seconds * 1e6, "teraflops": shape.flops / seconds / 1e12}
                run.add(Row(key, figures=figures, note=ours.limit if variant == "ours" else ""))
            table.append([
                name, f"{ours.seconds * 1e6:,.0f}", f"{theirs * 1e6:,.0f}", f"{ours.seconds / theirs:.2f}",
                "ours" if ours.seconds <= theirs else "library", ours.limit,
                f"{ours.config.name}, K in {ours.pieces}, {ours.programs} at once",
            ])  # fmt: skip
            reasons[ours.config.name] = ours.config.reason.split(":")[0]
        rate = f"{RATES[target].multiplied:,.0f} TFLOP/s" + (" published" if target != "sm_86" else ", not published")
        run.table(
            f"{target}: forward of a layer with an fp32 weight, estimated for {OF_TARGET[target]} from the compiled"
            f" kernel; library: {rate}",
            ["", "ours µs", "cast and library µs", "ratio", "chosen", "ours is limited by", "our configuration"],
            table,
        )
        for config, reason in reasons.items():
            console.print(f"{config}: for {reason}", highlight=False)


# ------------------------------------------------------------------------------------------------------ gradients

#: torch's foreach kernels: elements a block; tensors and blocks a launch, by what a launch's arguments may take
FOREACH_CHUNK = 65536
FOREACH = {"CUDA 12, ROCm": (110, 320), "CUDA 13": (770, 2240)}


def foreach_launches(sizes: Sequence[int], tensors: int, blocks: int) -> int:
    """Launches of a foreach kernel over one list: it ends one when its table of tensors or of blocks is full.

    >>> foreach_launches([1] * 111, 110, 320), foreach_launches([65536 * 321], 110, 320), foreach_launches([], 110, 320)
    (2, 2, 0)
    """
    launches, held, filled = 0, 0, 0
    for at, size in enumerate(sizes):
        if not size:
            continue
        held += 1
        chunks = -(-size // FOREACH_CHUNK)
        for chunk in range(chunks):
            filled += 1
            last = chunk == chunks - 1
            full = filled == blocks or (held == tensors and last)
            if full or (last and not any(sizes[at + 1 :])):
                launches += 1
                filled, held = 0, 0 if last else 1
    return launches


def gradients(run: Run) -> None:
    sizes = [rows * columns for rows, columns in bert_base_shapes()]
    numbers = sum(sizes)
    cases = {
        "check and unscale, ours": (1, 2 * numbers * FP32),
        **{f"check and unscale, foreach, {name}": (foreach_launches(sizes, *limits), 2 * numbers * FP32)
           for name, limits in FOREACH.items()},
        "check alone, ours": (1, numbers * FP32),
        **{f"check alone, foreach (scale 1), {name}": (foreach_launches(sizes, *limits), 2 * numbers * FP32)
           for name, limits in FOREACH.items()},
    }  # fmt: skip
    for name, (launches, moved) in cases.items():
        run.add(Row({"what": "gradients", "case": name}, {"kernels": launches, "least_bytes": moved}))
    run.table(
        f"BERT-base's fp32 gradients, {len(sizes)} tensors, {numbers / 1e6:.1f} million numbers: computed",
        ["", "launches", "MB moved"],
        [(name, launches, f"{moved / 1e6:,.0f}") for name, (launches, moved) in cases.items()],
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", nargs="+", choices=("sm_80", "sm_86", "sm_90", "sm_100", "gfx942"),
                      default=list(TARGETS))  # fmt: skip
    made.add_argument("--quick", action="store_true", help="one configuration of each kernel")
    return arguments(made, rounds=1, threads=1)


def main() -> int:
    args = parser().parse_args()
    run = Run("gpu", "GPU kernels, without a GPU", args)
    if importlib.util.find_spec("triton") is None:
        console.print("Triton is not installed: pip install -c constraints.txt 'amp-compiler[gpu]'.", highlight=False)
        return 0
    failures = compiled(args, run)
    drawn = computed(args, run)
    roofline(args, run)
    gradients(run)
    if torch.cuda.is_available():
        timed(run, max(args.rounds, 5), LAYERS, [rows * columns for rows, columns in bert_base_shapes()])
    else:
        console.print("No GPU: nothing was timed. Where torch finds one, this script also times products, gradients and"
                      " steps, beside cuBLAS, foreach and autocast (docs/gpu.md).")  # fmt: skip
    console.print(f"{failures} of the compiled kernels have a problem." if failures else "No kernel has a problem.")

    def plot(path: Path) -> None:
        title = "Bytes moved by a linear layer's training step: ours / cast before"
        bars(path, title, drawn, "computed from shapes; below 1 is less")

    return run.finish(plot)


if __name__ == "__main__":
    sys.exit(main())
