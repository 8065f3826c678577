"""Training steps and inference: ours compared with fp32, `torch.autocast`, `torch.compile` and `model.to`, by subject.

All variants of a subject run interleaved, in one process; `variants.py` has the variants, `subjects.py` the subjects.

/ fp32     the time divided by plain fp32's, round by round: below 1 is faster
/ peer     divided by autocast's; for what Inductor runs by autocast's with torch.compile
ops        dispatched, as `amp_compiler.inspect.profile.count_ops` counts: an op of ours counts once, whatever it calls
casts      number and KiB written, as `count_casts` counts them; "inside" are conversions within kernels of ours
peak       the largest sum of memory during a step, beyond parameters and the optimizer's state, torch's allocator
saved      what the forward of one micro-batch keeps for its backward: every piece of memory once, without parameters
           and batch; low copies of weights count
MFLOP      of products, convolutions and attention, and how much of it has low operands
RSS        `--memory`: how far a fresh process's memory rises while it builds, compiles and runs three steps

"–": not counted. Inductor's kernels are no ops, and casts inside them reach no memory.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from amp_compiler.kernels import build, cpu
from harness import (
    DTYPES,
    Ratio,
    Row,
    Run,
    arguments,
    console,
    count,
    in_fresh_process,
    interleave,
    panels,
    peak_bytes,
    peak_resident,
    positive,
    ratio,
    sampled,
    set_threads,
    spread,
)
from subjects import SUBJECTS, Subject
from variants import KINDS, OPTIMIZERS, REFERENCE, Setting, Variant, cannot, is_compiled, peer_of

NAMES = list(dict.fromkeys(name for makers in KINDS.values() for name in makers))
DRAWN = ("fp32+compile", "autocast", "autocast+compile", "model.to", "O2", "O2+inductor", "converted")
NONE = "–"
SAMPLE_SECONDS = 0.08  # many short samples: each is paired with its peer's of the same round
TIMES = ("", "ms: median (range)", "/ fp32", "/ peer", "")
COUNTS = ("", "ops", "casts", "KiB cast", "inside", "KiB inside", "peak KiB", "saved KiB", "MFLOP", "low", "RSS MB")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name, subject in SUBJECTS.items() if not subject.slow]
    names = ", ".join(SUBJECTS)
    found.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=usual, metavar="NAME", help=names)
    found.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    found.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    found.add_argument("--variants", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    found.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="fused")
    found.add_argument("--accumulate", type=positive, default=1, metavar="N", help="micro-batches an update")
    found.add_argument("--counts", action=argparse.BooleanOptionalAction, default=True)
    found.add_argument("--memory", action=argparse.BooleanOptionalAction, default=False, help="a fresh process each")
    found.add_argument("--tiny", action="store_true", help="every subject in its size for tests")
    found.add_argument("--one", metavar="KEY", help=argparse.SUPPRESS)
    return arguments(found)


@dataclass
class Comparison:
    """One subject, kind and dtype: a row for every variant."""

    subject: Subject
    kind: str
    setting: Setting
    dtype: str
    rows: dict[str, Row] = field(default_factory=dict)
    steps: dict[str, Callable[[], float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.subject.title}: {self.kind}, {self.dtype}"

    def measure(self, names: Sequence[str], args: argparse.Namespace) -> None:
        torch._dynamo.reset()
        for name in names:
            row = Row(self.key(name), reference=None if name == REFERENCE else self.key(REFERENCE))
            self.rows[name] = row
            with console.status(f"{self.title}: {name}"):
                try:
                    variant = KINDS[self.kind][name](self.subject, self.setting)
                    warm_up(variant)
                    if args.counts:
                        row.counts = self.count(name, variant)
                    if args.memory:
                        row.figures["resident_bytes"] = self.resident(name, args)
                    self.steps[name] = sampled(variant.step, 0.01 if args.tiny else SAMPLE_SECONDS, warm=True)
                except Exception as error:  # one variant that fails, in whatever way, leaves the others to be measured
                    self.failed(name, error)
        with console.status(f"{self.title}: timing"):
            found = interleave({name: self.guarded(name) for name in self.steps}, args.rounds)
        for name, samples in found.items():
            if not any(map(math.isnan, samples)):
                self.rows[name].samples["seconds"] = samples

    def key(self, name: str) -> dict[str, str | int]:
        key: dict[str, str | int] = {"subject": self.subject.name, "kind": self.kind, "dtype": self.dtype}
        if self.kind == "training" and self.setting.optimizer != "sgd":
            key["optimizer"] = self.setting.optimizer
        if self.kind == "training" and self.setting.accumulate > 1:
            key["accumulate"] = self.setting.accumulate
        return {**key, "variant": name}

    def count(self, name: str, variant: Variant) -> dict[str, int]:
        counts = {} if is_compiled(name) else count(variant.step).as_dict()
        counts["peak_bytes"] = peak_bytes(variant.step, variant.rest)
        if variant.saved is not None:
            counts["saved_bytes"] = variant.saved()
        return counts

    def resident(self, name: str, args: argparse.Namespace) -> int:
        key = json.dumps([self.subject.name, self.kind, self.dtype, name])
        rest = ["--threads", str(args.threads), "--optimizer", args.optimizer, "--accumulate", str(args.accumulate)]
        return int(in_fresh_process(__file__, ["--one", key, *rest])["resident_bytes"])

    def guarded(self, name: str) -> Callable[[], float]:
        """A sample, or NaN from the first failure on."""

        def sample() -> float:
            if self.rows[name].failed:
                return math.nan
            try:
                return self.steps[name]()
            except Exception as error:  # as above
                self.failed(name, error)
                return math.nan

        return sample

    def failed(self, name: str, error: BaseException) -> None:
        row = self.rows[name]
        row.note = cannot(name, error)
        if row.note:
            return
        lines = str(error).strip().splitlines()
        row.note, row.failed = f"{type(error).__name__}: {lines[0] if lines else ''}", True
        trace = "".join(traceback.format_exception(error, limit=-3))
        console.print(f"{self.title}, {name} failed:\n{trace}", markup=False, highlight=False)

    def ratio(self, name: str, peer: str) -> Ratio | None:
        own, other = (self.rows[n].samples.get("seconds") if n in self.rows else None for n in (name, peer))
        return ratio(own, other) if own and other and name != peer else None


def warm_up(variant: Variant) -> None:
    """The first step compiles and makes the optimizer's state; the second finds gradients and state in place."""
    variant.step()
    variant.step()


# ------------------------------------------------------------------------------------------------------- showing


def show(run: Run, found: Comparison, counts: bool) -> None:
    def compared(name: str, peer: str) -> str:
        return str(found.ratio(name, peer) or NONE)

    def times(name: str, row: Row) -> list[str]:
        if "seconds" not in row.samples:
            return [name, NONE, NONE, NONE, f"failed: {row.note}"[:70] if row.failed else row.note]
        peer = peer_of(name) if name not in ("fp32", "fp32+compile") else name
        return [name, str(spread(row.samples["seconds"])), compared(name, REFERENCE), compared(name, peer), ""]

    run.table(found.title, TIMES, [times(name, row) for name, row in found.rows.items()])
    if counts:
        run.table("What one step does", COUNTS, [counted(name, row) for name, row in found.rows.items()])


def counted(name: str, row: Row) -> list[str]:
    def cell(count: str, unit: int = 1) -> str:
        value = row.counts.get(count)
        return NONE if value is None else f"{value / unit:,.1f}" if unit == 1024 else f"{value:,}"

    low, total = row.counts.get("flops_low", 0), row.counts.get("flops_low", 0) + row.counts.get("flops_fp32", 0)
    resident = row.figures.get("resident_bytes")
    return [
        name, cell("ops"), cell("casts"), cell("cast_bytes", 1024), cell("inside_casts"), cell("inside_bytes", 1024),
        cell("peak_bytes", 1024), cell("saved_bytes", 1024), f"{total / 1e6:,.1f}" if total else NONE,
        f"{low / total:.0%}" if total else NONE, NONE if resident is None else f"{resident / 1e6:,.1f}",
    ]  # fmt: skip


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    parts: dict[str, dict[str, dict[str, Ratio | float]]] = {}
    for found in comparisons:
        bars = {name: found.ratio(name, REFERENCE) for name in DRAWN}
        group = parts.setdefault(found.kind, {})
        group[f"{found.subject.name}, {found.dtype}"] = {name: bar for name, bar in bars.items() if bar is not None}
    label = "times fp32's, log scale: left of 1 is faster"
    panels(path, "A training step and an inference, divided by plain fp32's", parts, label, log=True)


def one(args: argparse.Namespace) -> int:
    """For `--memory`, in a process of its own: the tiny form imports and sets up what is set up once."""
    name, kind, dtype, variant = json.loads(args.one)
    set_threads(args.threads)
    subject, make = SUBJECTS[name.removesuffix(" (tiny)")], KINDS[kind][variant]
    setting = Setting(DTYPES[dtype], args.optimizer, args.accumulate)
    warm_up(make(subject.tiny, setting))
    torch._dynamo.reset()

    def work() -> None:
        found = make(subject.tiny if name.endswith("(tiny)") else subject, setting)
        for _ in range(3):
            found.step()

    print(json.dumps({"resident_bytes": peak_resident(work)}))
    return 0


def main() -> int:
    args = parser().parse_args()
    if args.one:
        return one(args)
    run = Run("steps", "Training steps and inference", args)
    for dtype in args.dtypes:  # now: ops of fp32 steps too depend on whether the compiled kernels are there
        wide = cpu.runs_wide(DTYPES[dtype])
        if cpu.wants_compiled(DTYPES[dtype]):
            build.prepare()
        console.print(f"{dtype} {'wide' if wide else 'native'}: {cpu.reason(DTYPES[dtype])}", highlight=False)
    torch._dynamo.config.recompile_limit = 64  # all variants compile the same code; past the limit it would run eagerly
    names = [REFERENCE, *(name for name in args.variants if name != REFERENCE)]
    comparisons: list[Comparison] = []
    for subject in (SUBJECTS[name].tiny if args.tiny else SUBJECTS[name] for name in args.subjects):
        for kind in args.kinds:
            for dtype in args.dtypes:
                setting = Setting(DTYPES[dtype], args.optimizer, args.accumulate)
                found = Comparison(subject, kind, setting, dtype)
                found.measure([name for name in names if name in KINDS[kind]], args)
                show(run, found, args.counts or args.memory)
                run.rows += found.rows.values()
                found.steps.clear()  # models and compiled code are not needed any more
                comparisons.append(found)
    return run.finish(lambda path: draw(comparisons, path))


if __name__ == "__main__":
    sys.exit(main())
