"""Casts that run in a forward and a backward: ours against `torch.autocast`, number and bytes written.

Counted at run time by `amp_compiler.profile.count_casts`, whichever op casts. The same loss in fp32 stands
behind every variant; what it casts is in all counts. Ratios are ours / autocast: below 1 we cast less.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable

import torch
from common import (
    BF16_ONLY,
    DTYPES,
    NETWORKS,
    BertLike,
    console,
    print_header,
    print_table,
    write_results,
)
from torch import Tensor, nn

from amp_compiler import Policy, amp_compile
from amp_compiler.profile import CastCount, count_casts

Variant = Callable[[nn.Module, torch.dtype], Callable[..., Tensor]]


def autocast(model: nn.Module, dtype: torch.dtype) -> Callable[..., Tensor]:
    def run(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return model(*args)

    return run


def torch_policy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    policy = Policy.torch("cpu", dtype)
    return amp_compile(model, policy=policy, backend="eager", keep_output_dtypes=False)


def at_level(level: str) -> Variant:
    return lambda model, dtype: amp_compile(model, level=level, dtype=dtype, backend="eager")


PEER = "autocast"
VARIANTS: dict[str, Variant] = {
    PEER: autocast,
    "Policy.torch": torch_policy,
    "auto": at_level("auto"),
    "O1": at_level("O1"),
    "O2": at_level("O2"),
}


def bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return BertLike(layers=4, hidden=128, heads=4, intermediate=512, seq=64), (torch.randint(1000, (8, 64)),)


def count(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], variant: Variant, dtype: torch.dtype
) -> CastCount:
    torch._dynamo.reset()
    model, args = make()
    run = variant(model, dtype)

    def step() -> None:
        run(*args).float().pow(2).mean().backward()

    step()  # compiles
    model.zero_grad()
    for arg in args:
        arg.grad = None
    return count_casts(step)


def main() -> int:
    networks = {**NETWORKS, "bert 4x128": bert}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--networks", nargs="+", choices=networks, default=list(networks), metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    variants = [PEER, *(name for name in args.variants if name != PEER)]
    dtype = DTYPES[args.dtype]

    facts = print_header(f"Casts in a forward and a backward, {args.dtype}")
    rows: list[dict[str, object]] = []
    table: list[list[str]] = []
    totals = dict.fromkeys(variants, CastCount(0, 0))
    failures = 0
    for name in args.networks:
        if name in BF16_ONLY and dtype != torch.bfloat16:
            console.print(f"{name}: left out, autocast cannot run it in {args.dtype}")
            continue
        counts: dict[str, CastCount] = {}
        for variant in variants:
            try:
                counts[variant] = count(networks[name], VARIANTS[variant], dtype)
            except Exception:
                failures += 1
                console.print(f"{name}, {variant} failed:\n{traceback.format_exc(limit=-3)}", markup=False)
        if PEER not in counts:
            continue
        peer = counts[PEER]
        table.append([name, *(cell(counts.get(variant), peer) for variant in variants)])
        for variant, own in counts.items():
            ratios = {"number_ratio": own.number / peer.number, "bytes_ratio": own.bytes / peer.bytes}
            row = {"network": name, "dtype": args.dtype, "variant": variant}
            rows.append({**row, "number": own.number, "bytes": own.bytes, **ratios, "by_op": dict(own.by_op)})
        if len(counts) == len(variants):  # totals are of the networks that every variant ran
            for variant, own in counts.items():
                total = totals[variant]
                totals[variant] = CastCount(total.number + own.number, total.bytes + own.bytes)
    if totals[PEER].number:
        table.append(
            ["all that every variant ran", *(cell(total, totals[PEER]) for total in totals.values())]
        )
    print_table(
        "Casts, KiB written (each divided by autocast's)",
        ["network", *variants],
        table,
    )
    write_results(f"casts_{args.dtype}", facts, rows)
    return 1 if failures else 0


def cell(own: CastCount | None, peer: CastCount) -> str:
    if own is None:
        return "failed"
    text = f"{own.number:,}  {own.bytes / 1024:,.1f}"
    return text if own is peer else f"{text}  ({own.number / peer.number:.2f}, {own.bytes / peer.bytes:.2f})"


if __name__ == "__main__":
    sys.exit(main())
