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
from .data import Data

NAME = "calibrate"
HELP = "Run a model in fp32 on data; measure the range of every value and how much rounding it matters."
EXAMPLES = (
    "amp-compiler calibrate model.py:make --data model.py:batches -o ranges.json",
    "amp-compiler calibrate model.py:make --dtype bfloat16 --eval --policy policy.toml",
)
EPILOG = c.examples(EXAMPLES)

BatchSize = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Split the batches of files.", show_default=False)
]


def run(
    target: c.Target,
    data: Data = "",
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
        batches: Iterable[Any] = load_batches(data) if data else [(loaded.kwargs or loaded.args, None)]
        if batch_size is not None:
            batches = (part for batch in batches for part in _parts(batch, batch_size))
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


def _parts(batch: Any, size: int) -> Iterator[Any]:
    """Yield a batch in parts of ``size`` samples, split along the first dimension of every tensor."""
    import torch

    from ..common.torch_names import pytree

    leaves, spec = pytree.tree_flatten(batch)
    lengths = {len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(lengths) != 1:
        raise ArgumentError(f"--batch-size: the tensors of a batch have {sorted(lengths)} samples; they must agree.")
    for start in range(0, lengths.pop(), size):
        part = [x[start : start + size] if isinstance(x, torch.Tensor) and x.dim() else x for x in leaves]
        yield pytree.tree_unflatten(part, spec)
