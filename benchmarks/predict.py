"""Predicted speed-ups beside published ones, and beside what this CPU does.

*Published*: the rows of `speedups.json`, each with its source, predicted from shapes and the device's data sheet by
`amp_compiler.predict`. "fit" rows were looked at while the cost model was made, "check" rows were predicted when it was
done. The right side of 1: both say faster, or both say slower.

*This CPU*: the subjects as they train here, measured in turns, and the same steps predicted for the device
"this_machine", whose rates are measured first. Ratios are times divided by fp32's.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amp_compiler import Policy
from amp_compiler.cost.devices import Device, find
from amp_compiler.cost.machine import this_machine
from amp_compiler.prediction import band_of
from amp_compiler.study import Study
from harness import DTYPES, Row, Run, arguments, console, interleave, panels, sampled, set_threads, spread
from reference_networks import NETWORKS, Loss, make
from subjects import SUBJECTS, Subject
from variants import KINDS, Setting

ROWS = Path(__file__).with_name("speedups.json")
WITHIN = 0.25
VARIANTS = ("fp32", "autocast", "O2", "O3")
COLUMNS = ("network, batch", "device", "set", "published", "predicted", "error", "band", "in band")


@dataclass(frozen=True)
class Published:
    """A row of `speedups.json`."""

    split: str
    source: str
    device: str
    network: str
    batch: int
    fp32_batch: int
    training: bool
    policy: str
    channels_last: bool
    optimizer: str
    speedup: float
    predicted: float = 0.0  # as it was when the table was last written: `--write` does
    note: str = ""
    missed: str = ""

    @property
    def title(self) -> str:
        return f"{self.network}, {self.batch}, {'training' if self.training else 'inference'}"

    def study(self, mixed: bool) -> Study:
        """The network as it was measured on one side."""
        batch = self.batch if mixed else self.fp32_batch
        return _study(self.network, batch, self.training, self.channels_last and mixed, self.policy, self.optimizer)


@dataclass(frozen=True)
class Predicted:
    """What is predicted for a row."""

    row: Published
    speedup: float
    band: tuple[float, float]

    @property
    def error(self) -> float:
        return self.speedup / self.row.speedup - 1

    @property
    def right_side(self) -> bool:
        return (self.speedup > 1) == (self.row.speedup > 1)

    @property
    def within(self) -> bool:
        return abs(self.error) <= WITHIN


def published() -> list[Published]:
    """The rows, in order."""
    return [Published(**row) for row in json.loads(ROWS.read_text(encoding="utf-8"))["rows"]]


def write(found: Sequence[Predicted]) -> None:
    """Keep what was predicted beside what was published."""
    document = json.loads(ROWS.read_text(encoding="utf-8"))
    known = {one.row: round(one.speedup, 3) for one in found}
    lines = []
    for row in document["rows"]:
        row["predicted"] = known.get(Published(**row), row.get("predicted", 0.0))
        lines.append(f"  {json.dumps(row, ensure_ascii=False)}")
    about = json.dumps(document["_about"], ensure_ascii=False)
    ROWS.write_text("{\n" + f' "_about": {about},\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n", encoding="utf-8")


@functools.lru_cache(maxsize=4)  # a graph of BERT-large is some hundred megabytes
def _study(network: str, batch: int, training: bool, channels_last: bool, policy: str, optimizer: str) -> Study:
    model, args, kwargs = make(network, batch, training, channels_last)
    low = torch.float16
    chosen = Policy.torch("cuda", low) if policy == "autocast" else Policy(policy, low)
    return Study(model, args, kwargs, chosen, training, optimizer, "eager", 1, cpu_kernels=False)


def predict_row(row: Published) -> Predicted:
    """Predict the speed-up of a row, per sample where the two sides have different batches."""
    device = find(row.device)
    base, low = row.study(False).step(device, False), row.study(True).step(device, True)
    share = row.batch / row.fp32_batch
    lowest, highest = band_of(base, low)
    return Predicted(row, base.seconds() / low.seconds() * share, (lowest * share, highest * share))


# ------------------------------------------------------------------------------------------------------ this CPU


def predict_subject(subject: Subject, dtype: torch.dtype, device: Device, plain: Device) -> dict[str, float]:
    """Seconds of a training step, by variant."""
    ((x, y),) = subject.batches()
    policies = {
        "fp32": Policy("O0", dtype), "autocast": Policy.torch("cpu", dtype), "O2": Policy("O2", dtype),
        "O3": Policy("O3", dtype),
    }  # fmt: skip
    found = {}
    for name, policy in policies.items():
        ours = name != "autocast"
        study = Study(Loss(subject.make(), subject.loss_fn), (x, y), {}, policy, True, "sgd", "eager", 1, ours)
        found[name] = study.step(device if ours else plain, name != "fp32").seconds()
    return found


def measure_subject(subject: Subject, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds of a training step, by variant, in turns."""
    torch._dynamo.reset()
    cases: dict[str, Callable[[], float]] = {}
    for name in VARIANTS:
        variant = KINDS["training"][name](subject, Setting(dtype))
        variant.step()
        variant.step()
        cases[name] = sampled(variant.step, 0.08, warm=True)
    return interleave(cases, rounds)


# ------------------------------------------------------------------------------------------------------- showing


def show_published(run: Run, rows: list[Published]) -> list[Predicted]:
    found = []
    for row in rows:
        with console.status(f"{row.title} on {row.device}"):
            found.append(predict_row(row))
        one = found[-1]
        key = {
            "what": "published", "network": row.network, "batch": row.batch, "device": row.device, "split": row.split,
            "kind": "training" if row.training else "inference", "policy": row.policy, "source": row.source,
        }  # fmt: skip
        figures = {"published": row.speedup, "predicted": one.speedup, "low": one.band[0], "high": one.band[1]}
        run.add(Row(key, figures=figures, note=row.missed))
    run.table("Speed-ups: published and predicted", COLUMNS, [cells(one) for one in found])
    for source in dict.fromkeys(one.row.source for one in found):
        console.print(f"  {source}", highlight=False)
    for one in found:
        if not one.within or not one.right_side:
            cause = one.row.missed or "no cause is known"
            console.print(f"{one.row.title}, {one.row.device}: {cause}", highlight=False)
    for name in ("fit", "check"):
        part = [one for one in found if one.row.split == name]
        inside = sum(one.within for one in part)
        right = sum(one.right_side for one in part)
        held = sum(one.band[0] <= one.row.speedup <= one.band[1] for one in part)
        told = f"{inside} of {len(part)} within ±{WITHIN:.0%}, {right} on the right side of 1, {held} inside the band"
        console.print(f"{name}: {told}", highlight=False)
    return found


def cells(one: Predicted) -> list[str]:
    low, high = one.band
    row = one.row
    return [
        row.title, row.device, row.split, f"{row.speedup:.2f}", f"{one.speedup:.2f}", f"{one.error:+.0%}",
        f"{low:.2f}–{high:.2f}", "yes" if low <= row.speedup <= high else "no",
    ]  # fmt: skip


def show_cpu(run: Run, subjects: list[Subject], dtype: str, rounds: int) -> dict[str, dict[str, float]]:
    device = this_machine(again=True)
    plain = this_machine(again=True, native=True)  # torch's own kernels, as autocast runs them
    table, drawn, inside, total = [], {}, 0, 0
    for subject in subjects:
        with console.status(f"{subject.title}: {dtype}"):
            expected = predict_subject(subject, DTYPES[dtype], device, plain)
            measured = measure_subject(subject, DTYPES[dtype], rounds)
        for name in VARIANTS[1:]:
            seen = spread([a / b for a, b in zip(measured[name], measured["fp32"], strict=True)]).median
            told = expected[name] / expected["fp32"]
            key = {"what": "cpu", "subject": subject.name, "dtype": dtype, "variant": name}
            run.add(Row(key, samples={"seconds": measured[name]}, figures={"predicted": told, "measured": seen}))
            error = told / seen - 1
            inside, total = inside + (abs(error) <= WITHIN), total + 1
            table.append([subject.name, name, f"{seen:.2f}", f"{told:.2f}", f"{error:+.0%}"])
            drawn[f"{subject.name}, {name}"] = {"measured": seen, "predicted": told}
    columns = ("subject", "variant", "measured / fp32", "predicted / fp32", "error")
    run.table(f"Training steps on this CPU, {dtype}: time divided by fp32's", columns, table)
    console.print(f"{inside} of {total} within ±{WITHIN:.0%}", highlight=False)
    return drawn


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    found.add_argument("--split", nargs="+", choices=("fit", "check"), default=["fit", "check"])
    usual = [name for name, subject in SUBJECTS.items() if not subject.slow]
    found.add_argument("--subjects", nargs="*", choices=SUBJECTS, default=usual, metavar="NAME", help="on this CPU")
    found.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="on this CPU")
    found.add_argument("--write", action="store_true", help="keep the predictions in speedups.json: a test guards them")
    found.add_argument("--tiny", action="store_true", help="every subject in its size for tests")
    return arguments(found, rounds=6)


def chosen(args: argparse.Namespace) -> Iterator[Published]:
    return (row for row in published() if row.network in args.networks and row.split in args.split)


def main() -> int:
    args = parser().parse_args()
    run = Run("predict", "Predictions beside published speed-ups and beside this CPU", args)
    set_threads(args.threads)
    drawn: dict[str, dict[str, dict[str, Any]]] = {}
    rows = list(chosen(args))
    if rows:
        found = show_published(run, rows)
        if args.write:
            write(found)
        drawn["published"] = {
            f"{one.row.title}, {one.row.device}": {"published": one.row.speedup, "predicted": one.speedup}
            for one in found
        }
    if args.subjects:
        subjects = [SUBJECTS[name].tiny if args.tiny else SUBJECTS[name] for name in args.subjects]
        drawn["this CPU"] = show_cpu(run, subjects, args.dtype, args.rounds)
    label = "published: speed-up over fp32 or TF32; this CPU: time divided by fp32's"
    return run.finish(lambda path: panels(path, "Predicted and measured", drawn, label, log=True))


if __name__ == "__main__":
    sys.exit(main())
