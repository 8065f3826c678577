"""Casts that run in a forward and a backward: ours against `torch.autocast`, number and bytes written.

The subjects are every small network of the tests and a BERT-like encoder. Casts are counted at run time by
`amp_compiler.inspect.profile`, whichever op casts. Every variant has the same fp32 loss, whose casts are in all counts.
Ratios are ours / autocast: below 1 we cast less. "CUDA's lists" is what autocast itself would cast on a GPU.
"auto, a100_80" is level auto with neutral ops placed by the costs on that device; they include the time of ops, so it
need not have the fewest casts.
Conversions inside our own kernels don't count as casts: they are in the files as `inside`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from amp_compiler import Policy, amp_compile
from harness import DTYPES, Ratio, Row, Run, arguments, console, count, panels
from networks import BF16_ONLY, NETWORKS, BertLike

Made = tuple[nn.Module, tuple[Tensor, ...]]
Variant = Callable[[nn.Module, torch.dtype], Callable[..., Tensor]]
PEER = "autocast"


def autocast(model: nn.Module, dtype: torch.dtype) -> Callable[..., Tensor]:
    def run(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return model(*args)

    return run


def torch_policy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    policy = Policy.torch("cpu", dtype)
    return amp_compile(model, policy=policy, backend="eager", keep_output_dtypes=False)


def cuda_lists(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The casts of autocast on a GPU: its lists for CUDA, with each cast as autocast makes it, none folded. (With the
    CPU's lists, this counts the same as `torch.autocast` for every network here except the LSTM, which autocast runs as
    one op.)"""
    policy = Policy.torch("cuda", dtype)
    return amp_compile(model, policy=policy, backend="eager", keep_output_dtypes=False, disable_passes=["fold_casts"])


def at_level(model: nn.Module, dtype: torch.dtype, level: str, device: str | None = None) -> nn.Module:
    return amp_compile(model, level=level, dtype=dtype, backend="eager", device=device)


VARIANTS: dict[str, Variant] = {
    PEER: autocast,
    "CUDA's lists": cuda_lists,
    "Policy.torch": torch_policy,
    **{level: partial(at_level, level=level) for level in ("auto", "O1", "O2")},
    "auto, a100_80": partial(at_level, level="auto", device="a100_80"),
}


def bert() -> Made:
    torch.manual_seed(0)
    return BertLike(layers=4, hidden=128, heads=4, intermediate=512, seq=64), (torch.randint(1000, (8, 64)),)


SUBJECTS: dict[str, Callable[[], Made]] = {**NETWORKS, "bert": bert}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    found.add_argument("--networks", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), metavar="NAME")
    found.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    return arguments(found)


def counted(name: str, variant: str, dtype: str) -> Row:
    key: dict[str, str | int] = {"network": name, "dtype": dtype, "variant": variant}
    row = Row(key, reference=None if variant == PEER else {**key, "variant": PEER})
    torch._dynamo.reset()
    try:
        model, args = SUBJECTS[name]()
        run = VARIANTS[variant](model, DTYPES[dtype])

        def step() -> None:
            run(*args).float().pow(2).mean().backward()

        step()  # the first call compiles
        model.zero_grad()
        for arg in args:
            arg.grad = None
        row.counts = count(step).as_dict()
    except Exception as error:  # if one fails, in whatever way, the others are still counted
        lines = str(error).strip().splitlines()
        row.failed, row.note = True, f"{type(error).__name__}: {lines[0] if lines else ''}"
    return row


# ------------------------------------------------------------------------------------------------------- showing


def share(own: Row, peer: Row, name: str) -> float:
    """Return ours divided by the peer's; 1 if both have no cast."""
    first, second = own.counts[name], peer.counts[name]
    return first / second if second else 1.0 if first == 0 else float("inf")


def cell(own: Row | None, peer: Row) -> str:
    if own is None or own.failed:
        return "failed"
    text = f"{own.counts['casts']:,}  {own.counts['cast_bytes'] / 1024:,.1f}"
    ratios = f"  ({share(own, peer, 'casts'):.2f}, {share(own, peer, 'cast_bytes'):.2f})"
    return text if own is peer else text + ratios


def total(rows: Sequence[Row]) -> Row:
    names = ("casts", "cast_bytes")
    return Row({"network": "all"}, {name: sum(row.counts[name] for row in rows) for name in names})


def show(run: Run, dtype: str, found: Mapping[str, Mapping[str, Row]], variants: Sequence[str]) -> None:
    table = [[name, *(cell(rows.get(v), rows[PEER]) for v in variants)] for name, rows in found.items()]
    whole = [rows for rows in found.values() if not any(row.failed for row in rows.values())]
    if whole:
        totals = {variant: total([rows[variant] for rows in whole]) for variant in variants}
        table.append(["all that all ran", *(cell(totals[v], totals[PEER]) for v in variants)])
    run.table(f"{dtype}: casts, KiB written (each divided by autocast's)", ["network", *variants], table)


def draw(rows: Sequence[Row], path: Path) -> None:
    peers = {(row.key["network"], row.key["dtype"]): row for row in rows if row.key["variant"] == PEER}
    parts: dict[str, dict[str, dict[str, Ratio | float]]] = {}
    for row in rows:
        network, dtype, variant = (str(row.key[name]) for name in ("network", "dtype", "variant"))
        peer = peers[network, dtype]
        if row.reference is not None and not row.failed and not peer.failed:
            value = share(row, peer, "cast_bytes")
            parts.setdefault(dtype, {}).setdefault(network, {})[variant] = Ratio(value, value, value)
    panels(path, "Bytes cast in a forward and a backward, divided by torch.autocast's", parts, "of autocast's bytes")


def main() -> int:
    args = parser().parse_args()
    run = Run("casts", "Casts in a forward and a backward", args)
    variants = [PEER, *(name for name in args.variants if name != PEER)]
    for dtype in args.dtypes:
        found: dict[str, dict[str, Row]] = {}
        for name in args.networks:
            if name in BF16_ONLY and dtype != "bfloat16":
                console.print(f"{name}: left out, autocast cannot run it in {dtype}")
                continue
            with console.status(f"{name}, {dtype}"):
                rows = {variant: counted(name, variant, dtype) for variant in variants}
            run.rows += rows.values()
            if not rows[PEER].failed:
                found[name] = rows
        show(run, dtype, found, variants)
    return run.finish(lambda path: draw(run.rows, path))


if __name__ == "__main__":
    sys.exit(main())
