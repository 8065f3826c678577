"""Kernels on this CPU, op by op: low-precision products, convolution and attention compared with torch's native kernels
and fp32, by shape; and gradients checked and unscaled, compared with torch's foreach kernel.

All kernels of a case run interleaved. "ours" is what a compiled graph runs here (see `AMP_CPU_KERNELS`). "native" is
torch's low-precision kernel, with the weight's cast where autocast has one. "in Python" is what runs where there is no
C++ compiler. The time to compile the kernels, once per machine, is measured in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from amp_compiler.kernels import build, registry
from amp_compiler.kernels import cast_matmul as _defines  # noqa: F401
from amp_compiler.kernels.all_finite import all_finite
from amp_compiler.kernels.unscale import unscale_
from amp_compiler.kernels.wide import FORMS
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
    ratio,
    sampled,
    spread,
)
from subjects import bert_base_shapes

Runs: TypeAlias = Mapping[str, Callable[[], object]]
SECONDS = 0.02  # a sample

aten = torch.ops.aten
#: rows, summed, columns of a product
PRODUCTS = ((256, 512, 512), (512, 128, 128), (512, 128, 512), (512, 512, 128), (1024, 1024, 1024), (16, 768, 768))
MORE_PRODUCTS = (
    (1, 768, 768), (4, 768, 3072), (64, 768, 768), (256, 256, 256), (256, 1024, 1024), (512, 768, 3072),
    (512, 3072, 768), (2048, 512, 512), (1000, 333, 77),
)  # fmt: skip
#: batch, channels, size of images, output channels
CONVOLUTIONS = ((16, 3, 32, 32), (16, 32, 32, 64), (16, 64, 16, 128))
MORE_CONVOLUTIONS = ((8, 3, 64, 16), (8, 16, 64, 32), (1, 64, 56, 64), (16, 128, 8, 256))
#: batch, heads, length, width of attention
ATTENTION = ((8, 4, 64, 32), (2, 12, 128, 64))
MORE_ATTENTION = ((1, 4, 512, 64), (16, 8, 32, 16))


def products(dtype: torch.dtype, full: bool) -> dict[str, Runs]:
    cases: dict[str, Runs] = {}
    for m, k, n in PRODUCTS + MORE_PRODUCTS * full:
        x, w, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        low, op = x.to(dtype), torch.ops.amp.cast_matmul.default

        def native(low: Tensor = low, w: Tensor = w, bias: Tensor = bias) -> Tensor:
            return torch.addmm(bias.to(dtype), low, w.to(dtype).t())  # as autocast runs it: the weight is cast

        cases[f"product {m}x{k}x{n}"] = {
            "fp32": lambda x=x, w=w, bias=bias: torch.addmm(bias, x, w.t()),
            "native": native,
            "ours": lambda low=low, w=w, bias=bias, op=op: op(low, w.t(), bias, dtype, dtype),
            "in Python": lambda low=low, w=w, bias=bias: in_python("cast_matmul")(low, w.t(), bias, dtype, dtype),
        }
    return cases


def wide(dtype: torch.dtype, full: bool) -> dict[str, Runs]:
    cases: dict[str, Runs] = {}
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for batch, channels, size, out in CONVOLUTIONS + MORE_CONVOLUTIONS * full:
        x, w, b = torch.randn(batch, channels, size, size), torch.randn(out, channels, 3, 3), torch.randn(out)
        name = f"convolution {batch}x{channels}x{size}² to {out}"
        cases[name] = three(aten.convolution.default, dtype, (x, w, b), rest)
    for shape in ATTENTION + MORE_ATTENTION * full:
        q, gradient = torch.randn(shape), torch.randn(shape)
        out, logs = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        name = f"attention's backward {'x'.join(map(str, shape))}"
        cases[name] = three(backward, dtype, (gradient, q, q, q, out), (logs, 0.0, False))
    return cases


def three(
    op: Callable[..., object], dtype: torch.dtype, tensors: tuple[Tensor, ...], rest: tuple[object, ...]
) -> Runs:
    low = tuple(t.to(dtype) for t in tensors)
    form = FORMS[op]
    slow = in_python(form._schema.name.partition("::")[2])
    return {
        "fp32": lambda: op(*tensors, *rest), "native": lambda: op(*low, *rest), "ours": lambda: form(*low, *rest),
        "in Python": lambda: slow(*low, *rest),
    }  # fmt: skip


def in_python(name: str) -> Callable[..., object]:
    """Return the Python kernel of one of our ops."""
    return registry.python_kernel(name)


def build_seconds() -> float:
    """Return how long compiling the kernels takes with an empty cache, in a process that has not loaded them."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[build.CACHE] = folder
        start = time.perf_counter()
        built = build.prepare()
        seconds = time.perf_counter() - start
    if not built.loaded:
        raise RuntimeError(built.reason)
    return seconds


def gradients(dtype: torch.dtype) -> dict[str, Runs]:
    grads = [torch.randn(shape, dtype=dtype) * 1e-3 for shape in bert_base_shapes()]
    found, one = torch.zeros(1), torch.ones(1)
    foreach = torch._amp_foreach_non_finite_check_and_unscale_
    return {
        "BERT-base's gradients: check and unscale": {
            "foreach": lambda: foreach(grads, found, one), "ours": lambda: unscale_(grads, one, found),
        },
        "the same: check alone": {
            "foreach": lambda: foreach(grads, found, one), "ours": lambda: all_finite(grads),
        },
    }  # fmt: skip


def measure(case: str, dtype: str, runs: Runs, rounds: int, run: Run) -> dict[str, list[float]]:
    """Time all kernels of a case, interleaved; the last is divided by every other one, the first is the reference."""
    with console.status(f"{case}, {dtype}"):
        samples = interleave({kind: sampled(one, SECONDS) for kind, one in runs.items()}, rounds)
    reference: dict[str, str | int] = {"case": case, "dtype": dtype, "variant": next(iter(runs))}
    for kind, seconds in samples.items():
        key = {**reference, "variant": kind}
        run.add(Row(key, samples={"seconds": seconds}, reference=None if key == reference else reference))
    return samples


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    made.add_argument("--gradients", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--full", action="store_true", help="more shapes")
    made.add_argument("--build", action=argparse.BooleanOptionalAction, default=True, help="time their compilation")
    made.add_argument("--only-build", action="store_true", help=argparse.SUPPRESS)
    return arguments(made)


def main() -> int:
    args = parser().parse_args()
    if args.only_build:
        print(json.dumps({"seconds": build_seconds()}))
        return 0
    run = Run("kernels", "Kernels on this CPU", args)
    built = build.prepare()
    console.print(built.reason, highlight=False)
    if args.build and built.loaded:
        seconds: float = in_fresh_process(__file__, ["--only-build"])["seconds"]
        run.add(Row({"case": "compiling the kernels", "dtype": "", "variant": "ours"}, figures={"seconds": seconds}))
        console.print(f"Compiling them took {seconds:.1f} s.", highlight=False)
    drawn: dict[str, dict[str, Ratio | float]] = {}
    ms = "{:,.2f}".format
    with torch.inference_mode():
        for name in args.dtypes:
            dtype, rows = DTYPES[name], []
            for case, runs in {**products(dtype, args.full), **wide(dtype, args.full)}.items():
                samples = measure(case, name, runs, args.rounds, run)
                medians = [ms(spread(samples[kind]).median * 1e3) for kind in ("fp32", "native", "ours")]
                own = ratio(samples["ours"], samples["fp32"])
                others = [ratio(samples[kind], samples["ours"]) for kind in ("native", "in Python")]
                rows.append([case, *medians, own, *others])
                drawn.setdefault(case, {})[f"ours, {name}"] = own
                drawn[case][f"native, {name}"] = ratio(samples["native"], samples["fp32"])
            columns = ["", "fp32 ms", "native", "ours", "ours / fp32", "native / ours", "in Python / ours"]
            run.table(name, columns, rows)
        rows = []
        for name, dtype in {"float32": torch.float32, **{n: DTYPES[n] for n in args.dtypes}}.items():
            for case, runs in (gradients(dtype) if args.gradients else {}).items():
                samples = measure(case, name, runs, args.rounds, run)
                peer, own = (ms(spread(samples[kind]).median * 1e3) for kind in ("foreach", "ours"))
                rows.append([f"{case}, {name}", peer, own, ratio(samples["foreach"], samples["ours"])])
        if rows:
            run.table("Gradients", ["", "foreach ms", "ours ms", "foreach / ours"], rows)

    def plot(path: Path) -> None:
        bars(path, "Kernels on this CPU: time divided by fp32's", drawn, "× fp32, lower is better", log=True)

    return run.finish(plot)


if __name__ == "__main__":
    sys.exit(main())
