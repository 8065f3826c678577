"""Kernels on this CPU, op by op: low-precision products, convolution and attention compared with torch's native kernels
and fp32, by shape (`kernel_shapes.toml`); and gradients checked and unscaled, compared with torch's foreach kernel.

All kernels of a case run interleaved. "ours" is what a compiled graph runs here (see `AMP_CPU_KERNELS`). "native" is
torch's low-precision kernel, with the weight's cast where autocast has one. "in Python" is what runs where there is no
C++ compiler. The time to compile the kernels, once per machine, is measured in a fresh process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

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
_SHAPES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("kernel_shapes.toml").read_text())
NETWORKS: dict[str, dict[str, list[list[int]]]] = _SHAPES["networks"]
product = torch.ops.amp.cast_matmul.default


def shapes(kind: str, full: bool) -> list[list[int]]:
    found: list[list[int]] = _SHAPES[kind]["usual"] + _SHAPES[kind]["more"] * full
    return found


def usual(dtype: torch.dtype, full: bool) -> dict[str, Runs]:
    """Return the cases of small networks."""
    cases: dict[str, Runs] = {}
    for m, k, n in shapes("products", full):
        cases[f"product {m}x{k}x{n}"] = linear(dtype, m, k, n)
    for batch, m, k, n in shapes("batched", full):
        a, b = torch.randn(batch, m, k), torch.randn(batch, n, k).transpose(1, 2)
        cases[f"{batch} products {m}x{k}x{n}"] = multiplied(dtype, a, b, dtype)
    for shape in shapes("convolutions", full):
        cases |= convolution(dtype, *shape)
    for shape in shapes("attention", full):
        cases |= attention(dtype, shape)
    return cases


def of_network(name: str, dtype: torch.dtype) -> Iterator[tuple[str, Runs]]:
    """Yield the cases of a layer of real width, one at a time: forward, with a low-precision weight, and gradients."""
    network = NETWORKS[name]
    for (k, n), m in itertools.product(network["layers"], network["rows"]):
        x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
        title = f"{name} {m} x {k} to {n}"
        yield title, multiplied(dtype, x, w.t(), dtype)
        if m > 1:  # nobody trains with one row
            yield f"{title}, input gradient", multiplied(dtype, g, w, dtype)
            yield f"{title}, weight gradient", multiplied(dtype, g.t(), x, torch.float32)
    for shape in network["attention"]:
        yield from attention(dtype, shape).items()
    for shape in network["convolutions"]:
        yield from convolution(dtype, *shape, backward=True).items()


def linear(dtype: torch.dtype, m: int, k: int, n: int) -> Runs:
    """A layer of a training step: its weight is fp32, its bias too."""
    x, w, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    low = x.to(dtype)
    return {
        "fp32": lambda: torch.addmm(bias, x, w.t()),
        "native": lambda: torch.addmm(bias.to(dtype), low, w.to(dtype).t()),  # as autocast runs it: the weight is cast
        "ours": lambda: product(low, w.t(), bias, dtype, dtype),
        "in Python": lambda: in_python("cast_matmul")(low, w.t(), bias, dtype, dtype),
    }


def multiplied(dtype: torch.dtype, a: Tensor, b: Tensor, out: torch.dtype) -> Runs:
    """A product of two low-precision operands."""
    low_a, low_b = a.to(dtype), b.to(dtype)
    return {
        "fp32": lambda: torch.matmul(a, b),
        "native": lambda: torch.matmul(low_a, low_b).to(out),
        "ours": lambda: product(low_a, low_b, None, dtype, out),
        "in Python": lambda: in_python("cast_matmul")(low_a, low_b, None, dtype, out),
    }


def convolution(
    dtype: torch.dtype, batch: int, channels: int, size: int, out: int, kernel: int, stride: int, groups: int = 1,
    *, backward: bool = False,
) -> dict[str, Runs]:  # fmt: skip
    x, b = torch.randn(batch, channels, size, size), torch.randn(out)
    w = torch.randn(out, channels // groups, kernel, kernel)
    rest = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    name = f"convolution {batch}x{channels}x{size}² to {out}" + f" in {groups} groups" * (groups > 1)
    if (kernel, stride) != (3, 1):
        name += f", {kernel}x{kernel}" + f" by {stride}" * (stride > 1)
    cases = {name: three(aten.convolution.default, dtype, (x, w, b), rest)}
    if backward:
        g = torch.randn_like(aten.convolution.default(x, w, b, *rest))
        wanted = ([out], *rest, [True, True, False])
        cases[f"{name}, backward"] = three(aten.convolution_backward.default, dtype, (g, x, w), wanted)
    return cases


def attention(dtype: torch.dtype, shape: list[int]) -> dict[str, Runs]:
    """Heads as a projection gives them: of one token, side by side. One query is compared with 512 keys."""
    batch, heads, length, width = shape
    keys = 512 if length == 1 else length

    def made(tokens: int) -> Tensor:
        return torch.randn(batch, tokens, heads, width).transpose(1, 2)

    q, k, v, gradient = made(length), made(keys), made(keys), made(length)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, logs = forward(q, k, v)
    name = "x".join(map(str, shape))
    return {
        f"attention {name}": three(forward, dtype, (q, k, v), (0.0, False)),
        f"attention's backward {name}": three(backward, dtype, (gradient, q, k, v, out), (logs, 0.0, False)),
    }


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
    made.add_argument("--networks", nargs="+", choices=NETWORKS, default=[], help="shapes of these networks instead")
    made.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="also native, Python")
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
            wide = itertools.chain.from_iterable(of_network(network, dtype) for network in args.networks)
            kinds = ["fp32", "native", "ours", "in Python"] if args.peers else ["fp32", "ours"]
            for case, runs in wide if args.networks else usual(dtype, args.full).items():
                samples = measure(case, name, {kind: runs[kind] for kind in kinds}, args.rounds, run)
                medians = [ms(spread(samples[kind]).median * 1e3) for kind in kinds if kind != "in Python"]
                own = ratio(samples["ours"], samples["fp32"])
                others = [ratio(samples[kind], samples["ours"]) for kind in kinds if kind in ("native", "in Python")]
                rows.append([case, *medians, own, *others])
                drawn.setdefault(case, {})[f"ours, {name}"] = own
                if "native" in kinds:
                    drawn[case][f"native, {name}"] = ratio(samples["native"], samples["fp32"])
            times = [f"{kind} ms" for kind in kinds if kind != "in Python"]
            run.table(name, ["", *times, "ours / fp32", *["native / ours", "in Python / ours"] * args.peers], rows)
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
