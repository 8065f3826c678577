"""What a call and a training step of one nn.Linear(8, 8) cost: the time between ops, as the ops themselves take little.

A call in inference, a call in training mode, and one with its backward, beside eager fp32, `torch.compile` with
aot_eager in fp32, and autocast. A training step beside autocast and `GradScaler`, also with `torch.compile`. The time
is that of the processor, with one thread, which other work on the machine disturbs less than that of a clock.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import amp_compile, compile_train_step
from harness import DTYPES, Ratio, Row, Run, arguments, bars, console, interleave, positive, ratio

OURS = "O2"
#: kind of call -> the variant that ours is divided by
PEERS = {"inference": "aot_eager", "forward": "aot_eager", "backward": "aot_eager", "step": "autocast + GradScaler"}
Call = Callable[[], object]


def network() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)


def calls(dtype: torch.dtype) -> dict[tuple[str, str], Call]:
    """(kind, variant) -> the call."""
    model, x, _ = network()
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "eager": copy.deepcopy(model),
        "aot_eager": torch.compile(copy.deepcopy(model), backend="aot_eager"),
        "autocast": torch.autocast("cpu", dtype)(copy.deepcopy(model)),
        OURS: amp_compile(copy.deepcopy(model), dtype=dtype, backend="eager"),
    }
    made: dict[tuple[str, str], Call] = {}
    for name, forward in forwards.items():
        made["inference", name] = partial(torch.no_grad()(forward), x)
        made["forward", name] = partial(forward, x)
        made["backward", name] = lambda forward=forward: forward(x).sum().backward()
    return made


def steps(dtype: torch.dtype) -> dict[tuple[str, str], Call]:
    model, x, y = network()

    def by_hand(compiled: bool) -> Call:
        own = copy.deepcopy(model)
        forward = torch.compile(own, backend="aot_eager") if compiled else own
        optimizer, scaler = torch.optim.SGD(own.parameters(), 1e-3), torch.amp.GradScaler("cpu")

        def update() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = F.mse_loss(forward(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return update

    own = copy.deepcopy(model)
    step = compile_train_step(own, F.mse_loss, torch.optim.SGD(own.parameters(), 1e-3), dtype=dtype, backend="eager")
    return {
        ("step", "autocast + GradScaler"): by_hand(False),
        ("step", "autocast + GradScaler + aot_eager"): by_hand(True),
        ("step", OURS): lambda: step(x, y),
    }


def timed(call: Call, repeats: int) -> float:
    """CPU seconds per call."""
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats


def measure(args: argparse.Namespace, run: Run) -> None:
    cases = calls(DTYPES[args.dtype]) | steps(DTYPES[args.dtype])
    for call in cases.values():
        call()  # compiles
    with console.status("calls"):
        samples = interleave({key: partial(timed, call, args.repeats) for key, call in cases.items()}, args.rounds)
    for (kind, variant), seconds in samples.items():
        key: dict[str, str | int] = {"kind": kind, "dtype": args.dtype}
        reference = {**key, "variant": PEERS[kind]} if variant == OURS else None
        run.add(Row({**key, "variant": variant}, samples={"cpu_seconds": seconds}, reference=reference))


def ratios(run: Run) -> dict[str, Ratio]:
    """By kind of call, what ours takes divided by what its peer takes."""
    taken = {(str(row.key["kind"]), row.key["variant"]): row.samples["cpu_seconds"] for row in run.rows}
    return {kind: ratio(taken[kind, OURS], taken[kind, peer]) for kind, peer in PEERS.items()}


def show(run: Run) -> None:
    found = ratios(run)
    run.table(
        "CPU microseconds per call: median",
        ["kind", "variant", "µs", "O2 / its peer"],
        [
            (row.key["kind"], row.key["variant"], f"{1e6 * sorted(taken)[len(taken) // 2]:.1f}",
             found[str(row.key["kind"])] if row.reference else "")
            for row in run.rows for taken in [row.samples["cpu_seconds"]]
        ],
    )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    made.add_argument("--repeats", type=positive, default=300, help="calls per sample")
    return arguments(made, rounds=15, threads=1)


def main() -> int:
    args = parser().parse_args()
    title = "One nn.Linear(8, 8): the time between ops"
    run = Run("overhead", title, args)
    measure(args, run)
    show(run)

    def plot(path: Path) -> None:
        bars(path, title, {kind: {OURS: value} for kind, value in ratios(run).items()}, "/ its peer")

    return run.finish(plot)


if __name__ == "__main__":
    sys.exit(main())
