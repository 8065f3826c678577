"""Run the benchmarks: `quick` (3 minutes), `diagonal` (15 minutes), `compiled` (Inductor with every subject, 15
minutes), `units` (with bf16 units, 5 minutes) or `full` (hours), each script in its own process.

The plans are the table below. Scripts run one after the other, each sets its own threads; a failure does not stop the
rest. Result files and run_PLAN.json, with the time and exit code of each script, go to `--out`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = "fp32 fp32+compile autocast autocast+compile model.to"
EAGER = "fp32 autocast model.to"
COMPILED = "fp32 autocast autocast+compile O2 O2+inductor"


@dataclass(frozen=True)
class Job:
    """One script with its arguments; `name` is that of its result files."""

    name: str
    script: str
    arguments: str = ""

    def command(self, out: Path, more: Sequence[str] = ()) -> list[str]:
        own = [*shlex.split(self.arguments), *more, "--out", str(out), "--name", self.name]
        return [sys.executable, str(HERE / f"{self.script}.py"), *own]


@dataclass(frozen=True)
class Plan:
    """Jobs, and the minutes that they may take on 2 quiet cores."""

    minutes: int | None
    jobs: tuple[Job, ...]


PLANS = {
    "quick": Plan(3, (
        Job("training", "steps", "--subjects nine_256 bert --kinds training --dtypes bfloat16"
            " --variants fp32 autocast O2 --rounds 6"),
        Job("inference", "steps", "--subjects bert --kinds inference --dtypes float16 --variants fp32 autocast O2"
            " --rounds 6"),
        Job("compiled", "steps", "--subjects nine_256 --kinds training --dtypes bfloat16"
            " --variants fp32 autocast+compile O2+inductor --rounds 6"),
        Job("casts", "casts", "--networks dense bert --dtypes bfloat16 --variants autocast O2"),
        Job("growth", "growth", "--layers 2 6 --rounds 1 --no-resident"),
        Job("kernels", "kernels", "--dtypes bfloat16 --rounds 6 --no-gradients --no-build"),
        Job("gpu", "gpu", "--quick --target sm_90"),
    )),
    # Every subject trains in one dtype and infers in the other; bert in both. Inductor takes half a minute a variant.
    "diagonal": Plan(15, (
        Job("peers", "steps", f"--subjects bert --kinds training --dtypes bfloat16 --variants {PEERS} O2 O2+inductor"
            " --rounds 20"),
        Job("training_bfloat16", "steps", f"--subjects nine_512 resnet lstm --kinds training --dtypes bfloat16"
            f" --variants {COMPILED} --rounds 20"),
        Job("training_more_bfloat16", "steps", "--subjects llama encoder --kinds training --dtypes bfloat16"
            " --variants fp32 autocast O2 --rounds 20"),
        Job("training_more_float16", "steps", "--subjects bert gpt unet --kinds training --dtypes float16"
            " --variants fp32 autocast O2 --rounds 6"),
        Job("inference_bfloat16", "steps", "--subjects bert gpt unet --kinds inference"
            f" --dtypes bfloat16 --variants {EAGER} O2 converted --rounds 20"),
        Job("inference_float16", "steps", "--subjects bert llama encoder resnet --kinds inference"
            f" --dtypes float16 --variants {EAGER} O2 converted --rounds 16"),
        Job("levels", "steps", "--subjects bert --kinds training --dtypes bfloat16"
            " --variants fp32 autocast O0 O1 auto O2 O3 --rounds 16"),
        Job("widths", "steps", "--subjects nine_256 nine_1024 --kinds training --dtypes bfloat16"
            " --variants fp32 autocast O2 --rounds 16"),
        Job("casts", "casts", "--dtypes bfloat16 --variants autocast Policy.torch O2"),
        Job("growth", "growth", "--layers 2 6 --rounds 1"),
        Job("kernels", "kernels", "--rounds 6 --no-build"),
        Job("convert", "convert", "--rounds 6 --export-rounds 1"),
        Job("dump", "dump", "--rounds 1"),
        Job("gpu", "gpu", "--quick"),
    )),
    # Inductor behind both, every subject in both dtypes.
    "compiled": Plan(None, tuple(
        Job(f"compiled_{dtype}", "steps", "--subjects nine_512 bert gpt llama encoder resnet unet lstm --kinds training"
            f" --dtypes {dtype} --variants fp32 autocast+compile O2+inductor --no-counts --rounds {rounds}")
        for dtype, rounds in (("bfloat16", 20), ("float16", 6))
    )),
    # With a CPU's bf16 units, where it has some: the other plans are published without them.
    "units": Plan(None, tuple(
        Job(f"units_{name}", "steps", f"--subjects {subjects} --dtypes bfloat16 --variants fp32 autocast O2 --no-counts"
            f" --rounds {rounds}")
        for name, subjects, rounds in (
            ("small", "nine_512 bert gpt llama encoder resnet lstm", 16),
            ("real_width", "bert_large llama_2048 resnet50", 7),
        )
    )),
    "full": Plan(None, (
        Job("training", "steps", "--kinds training"),
        Job("inference", "steps", "--kinds inference"),
        Job("training_adamw", "steps", "--subjects nine_512 bert --kinds training --optimizer adamw"),
        Job("training_accumulated", "steps", "--subjects nine_512 bert --kinds training --accumulate 4"),
        Job("transformers", "steps", "--subjects hf_bert"),
        Job("casts", "casts"),
        Job("growth_bert", "growth", "--model bert --rounds 5"),
        Job("growth_llama", "growth", "--model llama --rounds 3"),
        Job("growth_inductor", "growth", "--layers 2 4 8 16 --rounds 2 --inductor --no-resident"),
        Job("kernels", "kernels", "--full --rounds 15"),
        Job("convert", "convert", "--rounds 15"),
        Job("decode", "decode", "--rounds 9"),
        Job("real_width", "steps", "--subjects bert_large llama_2048 resnet50"),
        Job("kernels_real_width", "kernels", "--networks bert_large llama_7b resnet50 depthwise --no-gradients"
            " --no-build"),
        Job("dump", "dump", "--graph forward inference joint"),
        Job("gpu", "gpu"),
        Job("frameworks", "frameworks"),
        Job("predict", "predict"),
    )),
}  # fmt: skip


@dataclass(frozen=True)
class Done:
    """A job that ran. `cpu_seconds` are of all its threads and processes: they tell when others used the machine."""

    name: str
    command: str
    seconds: float
    cpu_seconds: float
    code: int


def run(job: Job, out: Path, more: Sequence[str]) -> Done:
    command = job.command(out, more)
    shown = shlex.join(["python", f"benchmarks/{job.script}.py", *command[2:]])
    print(f"\n$ {shown}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    code = subprocess.run(command, env=environment, cwd=HERE.parent).returncode
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Done(job.name, shown, round(seconds, 1), round(spent, 1), code)


def summary(plan: str, done: Sequence[Done]) -> str:
    """Lines for people: the time of each job, the sum beside the limit, failures."""
    lines = []
    for job in done:
        failed = f"  failed, exit code {job.code}" if job.code else ""
        lines.append(f"{job.seconds:8.1f} s  {job.cpu_seconds:8.1f} s CPU  {job.name}{failed}")
    total, minutes = sum(job.seconds for job in done), PLANS[plan].minutes
    limit = "" if minutes is None else f" of {60 * minutes} s" + ": over the limit" * (total > 60 * minutes)
    return "\n".join([*lines, f"{total:8.1f} s  in all{limit}"])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("plan", choices=PLANS)
    made.add_argument("--only", nargs="+", metavar="NAME", help="of jobs; others are left out")
    made.add_argument("--list", action="store_true", help="print the commands and do nothing")
    made.add_argument("--out", type=Path, default=HERE / "results", metavar="DIR", help="where result files go")
    made.add_argument("--paddle", metavar="PYTHON", help="for frameworks.py")
    made.add_argument("--mindspore", metavar="PYTHON", help="for frameworks.py")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    jobs = PLANS[args.plan].jobs
    unknown = set(args.only or ()) - {job.name for job in jobs}
    if unknown:
        parser().error(f"no job of {args.plan} is named {', '.join(sorted(unknown))}")
    jobs = tuple(job for job in jobs if not args.only or job.name in args.only)
    pythons = [word for name in ("paddle", "mindspore") if getattr(args, name)
               for word in (f"--{name}", getattr(args, name))]  # fmt: skip
    if args.list:
        for job in jobs:
            print(shlex.join(["python", f"benchmarks/{job.script}.py", *shlex.split(job.arguments)]))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    done: list[Done] = []
    for job in jobs:
        done.append(run(job, args.out, pythons if job.script == "frameworks" else []))
        record = {"plan": args.plan, "date": date, "jobs": [vars(one) for one in done]}
        text = json.dumps(record, indent=1) + "\n"
        (args.out / f"run_{args.plan}.json").write_text(text)  # each time: a stopped run is known too
    print(f"\n{summary(args.plan, done)}")
    return 1 if any(job.code for job in done) else 0


if __name__ == "__main__":
    sys.exit(main())
