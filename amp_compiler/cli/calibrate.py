"""``amp-compiler calibrate``: measure the values of a model on data, and write them to a file."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.errors import ArgumentError
from ..common.files import check_writable
from . import common as c
from .data import Data

NAME = "calibrate"
HELP = "Run a model in fp32 on data; measure the range of every value and how much rounding it matters."
EXAMPLES = (
    "amp-compiler calibrate model.py:make --data model.py:batches -o ranges.json",
    "amp-compiler calibrate model.py:make --dtype bfloat16 --eval --policy policy.toml",
)
EPILOG = c.examples(EXAMPLES)

_MOST = "Run so many batches; at most 128 otherwise."
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
    most: Annotated[int | None, typer.Option("--most", min=1, help=_MOST, show_default=False)] = None,
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
            check_writable(path)
    with c.progress(quiet) as tell, contextlib.ExitStack() as stack:
        tell("loading torch")
        from ..calibration.calibrate import run_calibration
        from ..calibration.refusal import kinds
        from ..policy import Policy
        from .data import load_batches
        from .target import load, load_attribute

        tell(f"loading {target}")
        loaded = load(target, inputs, needs_inputs=not data)
        if loaded.model is None:
            raise ArgumentError(f"{target} is a saved program: pass the fp32 model that it was made from.")
        whole = None if batch_size is not None else most  # a part of a batch counts as a batch
        batches: list[Any] = load_batches(data, whole) if data else [(loaded.kwargs or loaded.args, None)]
        if batch_size is not None:
            batches = list(itertools.islice((part for batch in batches for part in _parts(batch, batch_size)), most))
        loss_fn = None if loss is None else load_attribute(loss)
        model = stack.enter_context(c.eval_mode(loaded.model)) if evaluate else loaded.model
        with c.hushed():
            found = run_calibration(
                model, _Told(batches, tell), loss_fn, dtype, scale, example=kinds(model, loaded.args, loaded.kwargs)
            )
        if output is not None:
            found.save(output)
        if policy is not None:
            Policy.calibrated(found, level).to_file(policy)
    if as_json:
        c.write(found.to_json(), None)
    elif not quiet:
        c.write(str(found), None)


class _Told:
    """Batches that show their number when they are asked for. They have a length, so all of them are taken."""

    def __init__(self, batches: Sequence[Any], tell: Callable[[str], None]) -> None:
        self.batches, self.tell = batches, tell

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches, 1):
            self.tell(f"batch {number} of {len(self.batches)}")
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
