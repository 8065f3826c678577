"""``amp-compiler plan``: what each of many processes will hold and send in a training step, without running it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Annotated

import typer

from . import common as c

if TYPE_CHECKING:
    from ..parallel.plan import Column, Plan

NAME = "plan"
HELP = (
    "Plan a training step of many processes on fake tensors: memory per rank, and the number and bytes of each "
    "collective, beside fp32 and FSDP2. TARGET's inputs are the batch of one process; the model may be on the meta "
    "device."
)
EXAMPLES = (
    "amp-compiler plan model.py:make --mesh 1024",
    "amp-compiler plan model.py:make --mesh 8 --parallel data --json",
)
EPILOG = c.examples(EXAMPLES)

Mesh = Annotated[int, typer.Option("--mesh", metavar="N", help="The number of processes that train together.")]
Parallel = Annotated[
    str, typer.Option("--parallel", help="data (DataParallel: the whole model in each process) or sharded (Sharded).")
]
Optimizer = Annotated[str, typer.Option("--optimizer", help="adamw, momentum or sgd, whose state is counted.")]
Keep = Annotated[
    bool, typer.Option("--keep-parameters", help="Sharded(reshard_after_forward=False): gather once per step.")
]


def run(
    target: c.Target, mesh: Mesh, parallel: Parallel = "sharded", inputs: c.Inputs = [], level: c.Level = "O2",  # noqa: B006
    dtype: c.Dtype = "", policy: c.PolicyFile = None, low: c.WhiteList = [], fp32: c.BlackList = [],  # noqa: B006
    exclude: c.Exclude = [], optimizer: Optimizer = "adamw", keep_parameters: Keep = False,  # noqa: B006
    as_json: c.Json = False, quiet: c.Quiet = False, debug: c.Debug = False,
) -> None:  # fmt: skip
    with contextlib.ExitStack() as stack:
        tell = stack.enter_context(c.progress(quiet))
        tell("loading torch")
        from ..common.errors import ArgumentError
        from ..parallel.plan import plan
        from .target import load

        tell(f"loading {target}")
        loaded = load(target, inputs)
        if loaded.model is None:
            raise ArgumentError("A saved program cannot be trained: give the model itself as TARGET.")
        stack.enter_context(c.hushed())
        request = c.Request(target, inputs, level, dtype, policy, low, fp32, exclude)
        tell("planning")
        found = plan(
            loaded.model, loaded.args, loaded.kwargs, policy=request.policy_for(loaded.model), ranks=mesh,
            parallel=parallel, optimizer=optimizer, reshard_after_forward=not keep_parameters,
        )  # fmt: skip
    if as_json:
        c.write(json.dumps(found.to_json(), indent=1), None)
        return
    _print(found, quiet)


def _print(found: Plan, quiet: bool) -> None:
    from rich.table import Table

    out = c.console()
    way = "Sharded" if found.parallel == "sharded" else "DataParallel"
    table = Table(
        title=f"{way} over {found.ranks:,} ranks, {found.parameters:,} parameters; per rank and step",
        title_justify="left", title_style="bold", box=None, pad_edge=False,
    )  # fmt: skip
    table.add_column("")
    for column in found.columns:
        table.add_column(column.title, justify="right")
    for label, key in (
        ("parameters", "parameters"), ("gradients", "gradients"), ("optimizer state", "optimizer"),
        ("activations", "activations"), ("peak", "peak"),
    ):  # fmt: skip
        table.add_row(label, *(size(getattr(column, key)) for column in found.columns))
    for kind, dtype in sorted({(t.kind, t.dtype) for column in found.columns for t in column.traffic}):
        table.add_row(f"{kind} {dtype}", *(_traffic(column, kind, dtype) for column in found.columns))
    table.add_row("all collectives", *(size(column.bytes_sent) for column in found.columns))
    out.print(table)
    if not quiet:
        for note in found.notes:
            out.print(f"note: {note}", style="dim")


def _traffic(column: Column, kind: str, dtype: str) -> str:
    for traffic in column.traffic:
        if (traffic.kind, traffic.dtype) == (kind, dtype):
            count = "" if traffic.count is None else f" in {traffic.count}"
            return f"{size(traffic.bytes)}{count}"
    return "-"


def size(number: int | None) -> str:
    """Bytes as people write them: ``3.14 GB``."""
    if number is None:
        return "?"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"
