"""What sampling the health of a training step costs: updates that are all sampled, interleaved with others.

A sample is four updates, of which one is run once more in fp32, so every sampled update counts with its share of that.
The cost of sampling every n-th update is an n-th of the difference; measured as a whole it would drown in noise. The
time is that of the processors, which other work on the machine disturbs less. The aim is 3 % with every 50th update.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from amp_compiler import TrainStep, compile_train_step
from harness import DTYPES, Ratio, Row, Run, arguments, bars, console, interleave, positive, ratio
from harness import spread as spread_of
from subjects import SUBJECTS, Subject
from variants import OPTIMIZERS

PEER, OURS = "not sampled", "all sampled"
AIM = 0.03
UPDATES = 4  # samples per batch that is run once more


def make(subject: Subject, dtype: torch.dtype, optimizer: str, every: int | None) -> TrainStep:
    model = subject.make()
    made = OPTIMIZERS[optimizer](model.parameters(), lr=1e-4, fused=True)
    return compile_train_step(model, subject.loss_fn, made, dtype=dtype, backend="eager", health_every=every)


def timed(step: TrainStep, batch: tuple[Tensor, Tensor]) -> float:
    """CPU seconds per update."""
    start = time.process_time()
    for _ in range(UPDATES):
        step(*batch)
    return (time.process_time() - start) / UPDATES


def measure(subject: Subject, args: argparse.Namespace, run: Run) -> None:
    (batch,) = subject.batches()
    cases: dict[str, Callable[[], float]] = {}
    for name, every in {PEER: None, OURS: 1}.items():
        step = make(subject, DTYPES[args.dtype], args.optimizer, every)
        cases[name] = partial(timed, step, batch)
        cases[name]()  # compiles
        if every is not None and step.health().looks != 1:
            raise RuntimeError(f"{UPDATES} updates had {step.health().looks} looks, not one")
    with console.status(subject.title):
        samples = interleave(cases, args.rounds)
    key: dict[str, str | int] = {"subject": subject.name, "dtype": args.dtype, "optimizer": args.optimizer}
    for name, seconds in samples.items():
        reference = None if name == PEER else {**key, "variant": PEER}
        run.add(Row({**key, "variant": name}, samples={"cpu_seconds": seconds}, reference=reference))


def ratios(run: Run) -> dict[str, Ratio]:
    """What a sampled update takes, divided by what one takes that is not sampled, by subject."""
    peers = {row.key["subject"]: row.samples["cpu_seconds"] for row in run.rows if row.reference is None}
    sampled = [row for row in run.rows if row.reference is not None]
    return {str(row.key["subject"]): ratio(row.samples["cpu_seconds"], peers[row.key["subject"]]) for row in sampled}


def show(run: Run, every: int) -> None:
    found = ratios(run)
    cost = {name: (value.median - 1) / every for name, value in found.items()}
    run.table(
        "CPU milliseconds per update: median (range)",
        ["subject", "variant", "an update", "ratio", f"cost of every {every}"],
        [
            (name, row.key["variant"], spread_of(row.samples["cpu_seconds"]), found[name] if row.reference else "",
             f"{cost[name]:.1%}" if row.reference else "")
            for row in run.rows for name in [str(row.key["subject"])]
        ],
    )  # fmt: skip
    over = [name for name, share in cost.items() if share > AIM]
    console.print(f"Over the aim of {AIM:.0%}: {', '.join(over)}." if over else f"All within {AIM:.0%}.")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=["bert", "resnet", "nine_256"], metavar="NAME")
    made.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    made.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    made.add_argument("--every", type=positive, default=50)
    return arguments(made, rounds=15, threads=1)


def main() -> int:
    args = parser().parse_args()
    title = "Training steps that are sampled for step.health()"
    run = Run("health", title, args)
    for name in args.subjects:
        torch._dynamo.reset()
        measure(SUBJECTS[name], args, run)
    show(run, args.every)

    def plot(path: Path) -> None:
        bars(path, title, {name: {OURS: value} for name, value in ratios(run).items()}, f"/ {PEER}")

    return run.finish(plot)


if __name__ == "__main__":
    sys.exit(main())
