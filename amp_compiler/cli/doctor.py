"""``amp-compiler doctor``: how fast this machine is in each dtype, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from . import common as c
from . import predict

NAME = "doctor"
HELP = "Inspect this machine: torch, CPU, GPUs and the speed of each dtype, and, if given, the shapes of a model."
EXAMPLES = ("amp-compiler doctor", "amp-compiler doctor model.py:make --json")
EPILOG = c.examples(EXAMPLES)
_NUMBERS = ("torch ms", "chosen ms", "× fp32", "GFLOP/s")


def run(
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="A model to advise on, as in dump.", show_default=False)
    ] = None,
    inputs: c.Inputs = [],  # noqa: B006
    as_json: c.Json = False,
    quiet: c.Quiet = False,
    debug: c.Debug = False,
) -> None:
    from .. import __version__
    from ..cost.machine import known_gpu, this_machine
    from ..inspect.advice import SIZE, advise_model, look

    with c.progress(quiet) as tell:
        machine = look(tell)
        tell("measuring this machine")
        cpu = this_machine()
    advice = list(machine.advice)
    if target is not None:
        request = c.Request(target, inputs, "O2", "", None, [], [], [])
        advice += advise_model(c.inspect(request, quiet).forward, machine.gpus)
        gpus = [known for g in machine.gpus if (known := known_gpu(g.name, g.memory)) is not None]
        advice += predict.advice(target, inputs, gpus[0] if gpus else cpu, quiet)
    if as_json:
        found = {"amp_compiler": __version__, **asdict(machine), "this_machine": dict(cpu.peak), "advice": advice}
        c.write(json.dumps(found, indent=1), None)
        return
    from rich.table import Table

    out = c.console()
    names = [f"{g.name}, compute capability {g.capability[0]}.{g.capability[1]}" for g in machine.gpus]
    facts = {
        "amp-compiler": __version__, "python": machine.python, "torch": machine.torch,
        "triton": machine.triton or "not installed", "cpu": f"{machine.cpu}, {machine.cores} cores",
        "cpu features": " ".join(machine.features) or "none that torch knows", "gpu": "; ".join(names) or "none",
        "measured": f"{cpu.peak['fp32'] / 1e9:.0f} GFLOP/s fp32, {cpu.bandwidth / 1e9:.0f} GB/s, "
        f"{cpu.launch * 1e6:.1f} µs for an op, for --device this_machine",
    }  # fmt: skip
    for name, value in facts.items():
        out.print(f"[bold]{name:<13}[/bold] {value}", soft_wrap=True)
    table = Table(title=f"\nA product of {SIZE} × {SIZE} matrices", title_justify="left", box=None, pad_edge=False)
    for column in ("device", "dtype", *_NUMBERS, "kernel", "runs on"):
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    for s in machine.speeds:
        table.add_row(
            s.device, s.dtype, f"{s.native * 1e3:.2f}", f"{s.ours * 1e3:.2f}", f"{s.of_fp32:.2f}", f"{s.gflops:.0f}",
            s.kernel, s.runs_on,
        )  # fmt: skip
    out.print(table)
    out.print()
    for text in advice:
        out.print(f"• {text}", markup=False, soft_wrap=True)
