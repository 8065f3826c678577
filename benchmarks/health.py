"""What sampling the health of a training step costs: updates with `health_every` and without it, interleaved.

A sample is a run of as many updates as it takes until a batch has been run once more in fp32: four periods. Its time
is that of the processors, which other work on the machine disturbs less. The aim is that at most 3 % of the time goes
there if every 50th update is sampled.
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

PEER = "not sampled"
AIM = 1.03
PERIODS = 4  # samples per batch that is run once more


def make(subject: Subject, dtype: torch.dtype, optimizer: str, every: int | None) -> TrainStep:
    model = subject.make()
    made = OPTIMIZERS[optimizer](model.parameters(), lr=1e-4, fused=True)
    return compile_train_step(model, subject.loss_fn, made, dtype=dtype, backend="eager", health_every=every)


def timed(step: TrainStep, batch: tuple[Tensor, Tensor], updates: int) -> float:
    """CPU seconds per update."""
    start = time.process_time()
    for _ in range(updates):
        step(*batch)
    return (time.process_time() - start) / updates


def measure(subject: Subject, args: argparse.Namespace, run: Run) -> None:
    (batch,) = subject.batches()
    updates = PERIODS * args.every
    cases: dict[str, Callable[[], float]] = {}
    for name, every in {PEER: None, f"every {args.every}": args.every}.items():
        step = make(subject, DTYPES[args.dtype], args.optimizer, every)
        timed(step, batch, args.every + 1)  # compiles, and takes the first look
        cases[name] = partial(timed, step, batch, updates)
    with console.status(subject.title):
        samples = interleave(cases, args.rounds)
    key: dict[str, str | int] = {"subject": subject.name, "dtype": args.dtype, "optimizer": args.optimizer}
    for name, seconds in samples.items():
        reference = None if name == PEER else {**key, "variant": PEER}
        run.add(Row({**key, "variant": name}, samples={"cpu_seconds": seconds}, reference=reference))


def ratios(run: Run) -> dict[str, Ratio]:
    """What an update takes with samples, divided by what it takes without, by subject."""
    peers = {row.key["subject"]: row.samples["cpu_seconds"] for row in run.rows if row.reference is None}
    sampled = [row for row in run.rows if row.reference is not None]
    return {str(row.key["subject"]): ratio(row.samples["cpu_seconds"], peers[row.key["subject"]]) for row in sampled}


def show(run: Run) -> None:
    found = ratios(run)
    run.table(
        "Milliseconds per update: median (range), and the ratio of the same rounds",
        ["subject", "variant", "an update", f"/ {PEER}"],
        [
            (row.key["subject"], row.key["variant"], spread_of(row.samples["cpu_seconds"]),
             "" if row.reference is None else f"{found[str(row.key['subject'])].median:.3f}")
            for row in run.rows
        ],
    )  # fmt: skip
    over = [name for name, value in found.items() if value.median > AIM]
    console.print(f"Over the aim of {AIM - 1:.0%}: {', '.join(over)}." if over else f"All within {AIM - 1:.0%}.")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=["bert", "resnet", "nine_256"], metavar="NAME")
    made.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    made.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    made.add_argument("--every", type=positive, default=50)
    return arguments(made, rounds=6, threads=1)


def main() -> int:
    args = parser().parse_args()
    title = f"Training steps with every {args.every}th update sampled for step.health()"
    run = Run("health", title, args)
    for name in args.subjects:
        torch._dynamo.reset()
        measure(SUBJECTS[name], args, run)
    show(run)

    def plot(path: Path) -> None:
        bars(path, title, {name: {"sampled": value} for name, value in ratios(run).items()}, f"/ {PEER}")

    return run.finish(plot)


if __name__ == "__main__":
    sys.exit(main())
