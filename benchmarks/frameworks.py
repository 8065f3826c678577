"""Paddle and MindSpore on the examples of their own guides to mixed precision, compared with ours and torch's autocast.

Paddle's nine linear layers with a mean squared error, MindSpore's three layers for handwritten digits with a cross
entropy. Every framework starts from the same weights and trains on the same batch with plain SGD for the same number of
steps. They run interleaved, each in a process of its own, and the loss after the last step is shown next to the time.

Both have to be in environments of their own, because they bring their own numpy and protobuf:

    python3.11 -m venv paddle && paddle/bin/pip install paddlepaddle
    python3.11 -m venv mindspore && mindspore/bin/pip install mindspore
    python benchmarks/frameworks.py --paddle paddle/bin/python --mindspore mindspore/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler, compile_train_step
from harness import DTYPES, Ratio, Row, Run, arguments, bars, console, interleave, ratio, spread

Arrays: TypeAlias = dict[str, numpy.ndarray]
Step: TypeAlias = Callable[[], Tensor]
Ask: TypeAlias = Callable[[str, int], tuple[float, float]]  # variant, steps: seconds a step, loss
PEERS = Path(__file__).resolve().parent / "peers"
WARM = 3  # as in peers/serve.py, so that all take the same number of steps


@dataclass(frozen=True)
class Example:
    """One framework's example: the network as torch has it, its loss, and the settings of the guide."""

    framework: str
    subject: str
    package: str  # on PyPI
    worker: str
    sizes: tuple[tuple[int, int], ...]  # in, out of each layer
    relu: bool
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    rate: float
    scale: float
    batch: Callable[[numpy.random.Generator], tuple[numpy.ndarray, numpy.ndarray]]

    def arrays(self) -> Arrays:
        """Return weights and batch: uniform within 1 / sqrt(inputs), which preserves the size of activations."""
        random = numpy.random.default_rng(0)
        made: Arrays = {}
        for number, (inputs, outputs) in enumerate(self.sizes):
            limit = inputs**-0.5
            made[f"w{number}"] = random.uniform(-limit, limit, (outputs, inputs)).astype("float32")
            made[f"b{number}"] = random.uniform(-limit, limit, outputs).astype("float32")
        made["x"], made["y"] = self.batch(random)
        return made

    def model(self, arrays: Arrays) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()] if self.relu else []
        for number, (inputs, outputs) in enumerate(self.sizes):
            if number and self.relu:
                layers.append(nn.ReLU())
            linear = nn.Linear(inputs, outputs)
            with torch.no_grad():
                linear.weight.copy_(torch.from_numpy(arrays[f"w{number}"]))
                linear.bias.copy_(torch.from_numpy(arrays[f"b{number}"]))
            layers.append(linear)
        return nn.Sequential(*layers)


def examples(width: int, batch: int) -> list[Example]:
    def regression(random: numpy.random.Generator) -> tuple[numpy.ndarray, numpy.ndarray]:
        return random.random((batch, width), dtype="float32"), random.random((batch, width), dtype="float32")

    def digits(random: numpy.random.Generator) -> tuple[numpy.ndarray, numpy.ndarray]:
        return random.random((64, 1, 28, 28), dtype="float32"), random.integers(0, 10, 64)

    return [
        Example("paddle", f"nine_{width}", "paddlepaddle", "paddle_nine.py", ((width, width),) * 9, False,
                F.mse_loss, 1e-4, 1024.0, regression),
        Example("mindspore", "digits", "mindspore", "mindspore_digits.py", ((784, 512), (512, 512), (512, 10)), True,
                F.cross_entropy, 1e-2, 2.0**16, digits),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- torch


def torch_step(example: Example, arrays: Arrays, dtype: torch.dtype | None) -> Step:
    """A loop as PyTorch's documentation has it; `dtype` None: fp32."""
    model, x, y = example.model(arrays), torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    optimizer = torch.optim.SGD(model.parameters(), example.rate, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=example.scale, enabled=dtype is not None)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = example.loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def our_step(example: Example, arrays: Arrays, level: str, dtype: torch.dtype) -> Step:
    model, x, y = example.model(arrays), torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    optimizer = torch.optim.SGD(model.parameters(), example.rate, fused=True)
    scaler = DynamicLossScaler(init_scale=example.scale)
    compiled = compile_train_step(model, example.loss_fn, optimizer, level, dtype=dtype, loss_scaler=scaler)
    return lambda: compiled(x, y).loss


# ------------------------------------------------------------------------------------------------- turns


@dataclass
class Side:
    """One variant of one framework: takes steps, remembers the last loss."""

    take: Callable[[int], tuple[float, float]]  # so many steps: seconds a step, loss
    loss: float = field(default=float("nan"))

    def sample(self, steps: int) -> float:
        seconds, self.loss = self.take(steps)
        return seconds


def here(step: Step) -> Side:
    for _ in range(WARM):
        step()

    def take(steps: int) -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(steps):
            loss = step().item()  # as the guides do, and the workers
        return (time.perf_counter() - start) / steps, loss

    return Side(take)


@contextmanager
def worker(example: Example, python: str, arrays: Path, threads: int) -> Iterator[tuple[dict[str, Any], Ask]]:
    """A worker in the framework's own interpreter: what it said at the start, and a function that asks it."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "GLOG_v": "3"}
    environment.pop("PYTHONPATH", None)
    command = [python, str(PEERS / example.worker), str(arrays)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            cwd=arrays.parent,  # MindSpore writes the networks that it rewrites to the folder it is in
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        sent, received = process.stdin, process.stdout

        def answer() -> dict[str, Any]:
            line = received.readline()
            if not line:
                process.wait()
                log.seek(0)
                told = log.read().strip().splitlines() or ["it said nothing"]
                raise RuntimeError(f"the worker of {example.framework} ended: {told[-1]}")
            found: dict[str, Any] = json.loads(line)
            return found

        def ask(variant: str, steps: int) -> tuple[float, float]:
            print(json.dumps({"variant": variant, "steps": steps}), file=sent, flush=True)
            said = answer()
            return said["seconds"], said["loss"]

        try:
            yield answer(), ask
        finally:
            sent.close()
            process.wait()
            received.close()


def measure(example: Example, python: str, args: argparse.Namespace, run: Run) -> None:
    arrays = example.arrays()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file = Path(folder) / "arrays.npz"
        numpy.savez(file, allow_pickle=False, **arrays)
        said, ask = stack.enter_context(worker(example, python, file, args.threads))
        name = f"{example.framework} {said['version']}"
        setattr(args, example.framework, said["version"])  # the result file names versions, not places
        sides: dict[tuple[str, str], Side] = {
            (name, variant): Side(partial(ask, variant)) for variant in said["variants"]
        }
        sides["torch", "fp32"] = here(torch_step(example, arrays, None))
        for dtype in args.dtypes:
            sides["torch", f"autocast {dtype}"] = here(torch_step(example, arrays, DTYPES[dtype]))
            for level in ("O1", "O2"):
                sides["ours", f"{level} {dtype}"] = here(our_step(example, arrays, level, DTYPES[dtype]))
        cases = {" ".join(key): partial(side.sample, args.steps) for key, side in sides.items()}
        with console.status(f"{example.framework}: {example.subject}"):
            samples = interleave(cases, args.rounds)
    table: list[list[object]] = []
    for (framework, variant), side in sides.items():
        seconds = samples[f"{framework} {variant}"]
        own = "torch" if framework == "ours" else framework
        reference: dict[str, str | int] = {"subject": example.subject, "framework": own, "variant": "fp32"}
        key: dict[str, str | int] = {"subject": example.subject, "framework": framework, "variant": variant}
        run.add(Row(key, samples={"seconds": seconds}, figures={"loss": side.loss},
                    reference=None if variant == "fp32" else reference))  # fmt: skip
        fp32 = samples[f"{own} fp32"]
        shown = "" if variant == "fp32" else str(ratio(seconds, fp32))
        torch_fp32 = "" if key == reference and own == "torch" else str(ratio(seconds, samples["torch fp32"]))
        table.append([f"{framework} {variant}", spread(seconds), shown, torch_fp32, f"{side.loss:.6f}"])
    total = WARM + args.rounds * args.steps
    run.table(
        f"{example.subject}, as in {example.framework}'s guide",
        ["", "step ms: median (range)", "/ its own fp32", "/ torch's fp32", f"loss at step {total}"],
        table,
    )
    refused: dict[str, list[str]] = {}
    for variant, why in said["refused"].items():
        refused.setdefault(why, []).append(variant)
        run.add(Row({"subject": example.subject, "framework": name, "variant": variant}, note=f"refused: {why}"))
    for why, variants in refused.items():
        console.print(f"{name} does not run {', '.join(variants)}: {why}", markup=False, highlight=False)


def installed(python: str | None, package: str) -> str | None:
    """The interpreter, if it is one and has the package."""
    if python is None or shutil.which(python) is None:
        return None
    python = os.path.abspath(shutil.which(python) or python)
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return python if subprocess.run([python, "-c", code]).returncode == 0 else None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--paddle", metavar="PYTHON", help="an interpreter that has Paddle")
    made.add_argument("--mindspore", metavar="PYTHON", help="an interpreter that has MindSpore")
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    made.add_argument("--width", type=int, default=512, help="of the nine layers (the guide has 8192, on a V100)")
    made.add_argument("--batch", type=int, default=256, help="of the nine layers (the guide has 2048)")
    made.add_argument("--steps", type=int, default=5, help="a sample")
    arguments(made)
    return made


def main() -> int:
    args = parser().parse_args()
    run = Run("frameworks", "Other frameworks on their own examples", args)
    pythons: Mapping[str, str | None] = {"paddle": args.paddle, "mindspore": args.mindspore}
    args.paddle = args.mindspore = None
    for example in examples(args.width, args.batch):
        python = installed(pythons[example.framework], example.framework)
        if python is None:
            name = example.framework
            console.print(
                f"{name}: not measured, no interpreter that has it was given. python -m venv {name}; "
                f"{name}/bin/pip install {example.package}; then --{name} {name}/bin/python",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        else:
            measure(example, python, args, run)
    return run.finish(plot=(lambda path: draw(run.rows, path)) if run.rows else None)


def draw(rows: list[Row], path: Path) -> None:
    groups: dict[str, dict[str, Ratio | float]] = {}
    for row in (row for row in rows if row.samples):
        name = f"{str(row.key['framework']).partition(' ')[0]}, {row.key['variant']}"
        groups.setdefault(str(row.key["subject"]), {})[name] = spread(row.samples["seconds"]).median * 1e3
    bars(path, "A training step on the frameworks' own examples", groups, "ms, lower is better", log=True)


if __name__ == "__main__":
    sys.exit(main())
