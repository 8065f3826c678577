"""``amp-compiler calibrate``: measure the values of a model on data, and write them to a file."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.errors import ArgumentError
from ..common.files import check_target
from . import common as c

NAME = "calibrate"
HELP = "Run a model in fp32 on data; measure the range of every value and how much rounding it matters."
EXAMPLES = (
    "amp-compiler calibrate model.py:make --data train.npz --loss model.py:loss -o ranges.json",
    "amp-compiler calibrate model.py:make --data batches.pt --dtype bfloat16 --eval -o ranges.json",
    "amp-compiler calibrate model.py:make --data model.py:batches --most 16 --policy policy.toml",
)
EPILOG = c.examples(EXAMPLES)

Data = Annotated[
    list[str],
    typer.Option(
        "--data", metavar="SOURCE", show_default=False,
        help="Batches: an .npz file (arrays arr_0, arr_1 … or named as the model's arguments, and targets), a .pt file "
        "(a list of (inputs, targets)), or file.py:function, which gives batches. May be repeated. Without it, the "
        "example inputs are the only batch.",
    ),
]  # fmt: skip
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Split the batches of files.", show_default=False)
]


def run(
    target: c.Target,
    data: Data = [],  # noqa: B006
    inputs: c.Inputs = [],  # noqa: B006
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss", metavar="FILE.py:FUNCTION", show_default=False,
            help="A function of (output, targets). Without it, the model's output is the loss if it is a scalar.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", "-d", help="float16 or bfloat16.")] = "float16",
    scale: Annotated[
        float | None, typer.Option("--scale", help="The loss scale to judge gradients at.", show_default=False)
    ] = None,
    most: Annotated[int | None, typer.Option("--most", min=1, help="Run so many batches.", show_default=False)] = None,
    batch_size: BatchSize = None,
    evaluate: Annotated[bool, typer.Option("--eval", help="Put the model in eval mode first.")] = False,
    output: c.Output = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="Also write Policy.calibrated as TOML.", show_default=False),
    ] = None,
    level: c.Level = "O2",
    as_json: c.Json = False,
    quiet: c.Quiet = False,
    debug: c.Debug = False,
) -> None:
    for path in (output, policy):
        if path is not None:
            check_target(path)
    with c.progress(quiet) as tell, contextlib.ExitStack() as stack:
        tell("loading torch")
        from ..calibration.calibrate import calibrate
        from ..policy import Policy
        from .data import load_batches
        from .target import load, load_attribute

        tell(f"loading {target}")
        loaded = load(target, inputs, needs_inputs=not data)
        if loaded.model is None:
            raise ArgumentError(f"{target} is a saved program: pass the fp32 model that it was made from.")
        batches: Iterable[Any] = load_batches(data, batch_size) if data else [(loaded.kwargs or loaded.args, None)]
        loss_fn = None if loss is None else load_attribute(loss)
        model = stack.enter_context(c.eval_mode(loaded.model)) if evaluate else loaded.model
        with c.hushed():
            chosen = itertools.islice(_counted(batches, tell), most)
            found = calibrate(model, chosen, loss_fn, dtype=dtype, scale=scale)
        if output is not None:
            found.save(output)
        if policy is not None:
            Policy.calibrated(found, level).to_file(policy)
    if as_json:
        c.write(found.to_json(), None)
    elif not quiet:
        c.write(str(found), None)


def _counted(batches: Iterable[Any], tell: Callable[[str], None]) -> Iterator[Any]:
    for number, batch in enumerate(batches, 1):
        tell(f"batch {number}")
        yield batch
