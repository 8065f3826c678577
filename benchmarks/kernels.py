"""Kernels on this CPU, op by op: low-precision products, convolution and attention beside torch's native kernels and
fp32, by shape; and gradients checked and unscaled beside torch's foreach kernel.

Times are medians of runs in turns. "ours" is what a graph of ours runs here (see `AMP_CPU_KERNELS`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from common import DTYPES, console, interleave, print_header, print_table, sampled, write_results
from torch import Tensor

from amp_compiler.kernels import build
from amp_compiler.kernels import cast_matmul as _defines  # noqa: F401
from amp_compiler.kernels.all_finite import all_finite
from amp_compiler.kernels.unscale import unscale_
from amp_compiler.kernels.wide import wide_form

aten = torch.ops.aten
#: rows, summed, columns of a product
PRODUCTS = ((256, 512, 512), (512, 128, 128), (512, 128, 512), (512, 512, 128), (1024, 1024, 1024), (16, 768, 768))
#: batch, channels, size of images, output channels
CONVOLUTIONS = ((16, 3, 32, 32), (16, 32, 32, 64), (16, 64, 16, 128))
#: batch, heads, length, width of attention
ATTENTION = ((8, 4, 64, 32), (2, 12, 128, 64))


def products(dtype: torch.dtype) -> dict[str, dict[str, Callable[[], object]]]:
    cases: dict[str, dict[str, Callable[[], object]]] = {}
    for m, k, n in PRODUCTS:
        x, w, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        low, op = x.to(dtype), torch.ops.amp.cast_matmul.default

        def native(low: Tensor = low, w: Tensor = w, bias: Tensor = bias) -> Tensor:
            return torch.addmm(bias.to(dtype), low, w.to(dtype).t())  # as autocast runs it: the weight is cast

        cases[f"product {m} x {k} x {n}"] = {
            "fp32": lambda x=x, w=w, bias=bias: torch.addmm(bias, x, w.t()),
            "native": native,
            "ours": lambda low=low, w=w, bias=bias, op=op: op(low, w.t(), bias, dtype, dtype),
        }
    return cases


def wide(dtype: torch.dtype) -> dict[str, dict[str, Callable[[], object]]]:
    cases: dict[str, dict[str, Callable[[], object]]] = {}
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for batch, channels, size, out in CONVOLUTIONS:
        x, w, b = torch.randn(batch, channels, size, size), torch.randn(out, channels, 3, 3), torch.randn(out)
        name = f"convolution {batch} x {channels} x {size}² to {out}"
        cases[name] = three(aten.convolution.default, dtype, (x, w, b), rest)
    for shape in ATTENTION:
        q, gradient = torch.randn(shape), torch.randn(shape)
        out, logs = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        name = f"attention's backward {' x '.join(map(str, shape))}"
        cases[name] = three(backward, dtype, (gradient, q, q, q, out), (logs, 0.0, False))
    return cases


def three(
    op: Callable[..., object], dtype: torch.dtype, tensors: tuple[Tensor, ...], rest: tuple[object, ...]
) -> dict[str, Callable[[], object]]:
    low = tuple(t.to(dtype) for t in tensors)
    form = wide_form(op)
    return {"fp32": lambda: op(*tensors, *rest), "native": lambda: op(*low, *rest), "ours": lambda: form(*low, *rest)}


def bert_base(dtype: torch.dtype) -> list[Tensor]:
    """Gradients as many and as large as those of BERT-base: 199 tensors, 109.5 million numbers."""
    hidden, inner = 768, 3072
    layer = [(hidden, hidden), (hidden,)] * 4 + [(hidden,)] * 4
    layer += [(inner, hidden), (inner,), (hidden, inner), (hidden,)]
    embeddings = [(30522, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    shapes = [*embeddings, *(layer * 12), (hidden, hidden), (hidden,)]
    return [torch.randn(shape, dtype=dtype) * 1e-3 for shape in shapes]


def gradients(dtype: torch.dtype) -> dict[str, dict[str, Callable[[], object]]]:
    grads, found, one = bert_base(dtype), torch.zeros(1), torch.ones(1)
    foreach = torch._amp_foreach_non_finite_check_and_unscale_
    return {
        "BERT-base's gradients: check and unscale": {
            "foreach": lambda: foreach(grads, found, one), "ours": lambda: unscale_(grads, one, found),
        },
        "the same: check alone": {
            "foreach": lambda: foreach(grads, found, one), "ours": lambda: all_finite(grads),
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = print_header("Kernels on this CPU")
    console.print(build.load().reason, highlight=False)
    records: list[dict[str, object]] = []
    ms = "{:,.2f}".format
    with torch.inference_mode():
        for name in args.dtype:
            dtype, rows = DTYPES[name], []
            for case, runs in {**products(dtype), **wide(dtype)}.items():
                with console.status(case):
                    samples = interleave({kind: sampled(run, 0.02) for kind, run in runs.items()}, args.rounds)
                fp32, native, own = (statistics.median(samples[kind]) for kind in ("fp32", "native", "ours"))
                rows.append([case, *(ms(t * 1e3) for t in (fp32, native, own)), ms(own / fp32), ms(native / own)])
                records.append({"case": case, "dtype": name, "fp32": fp32, "native": native, "ours": own})
            print_table(name, ["", "fp32 ms", "native ms", "ours ms", "ours/fp32", "native/ours"], rows)
        rows = []
        for name, dtype in {"float32": torch.float32, **{n: DTYPES[n] for n in args.dtype}}.items():
            for case, runs in gradients(dtype).items():
                with console.status(case):
                    samples = interleave({kind: sampled(run, 0.02) for kind, run in runs.items()}, args.rounds)
                peer, own = (statistics.median(samples[kind]) for kind in ("foreach", "ours"))
                rows.append([f"{case}, {name}", ms(peer * 1e3), ms(own * 1e3), ms(peer / own)])
                records.append({"case": case, "dtype": name, "foreach": peer, "ours": own})
        print_table("Gradients", ["", "foreach ms", "ours ms", "foreach/ours"], rows)
    write_results("kernels", facts, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
