"""--data: batches for a model, from a file or from a Python function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import typer

from ..common.errors import ArgumentError

#: batches that are taken from a function's iterable
MOST_BATCHES = 128
_FORMS = (
    "a .npz file (one array per argument of the model: arr_0, arr_1 … by position, or by name; 'targets' if there are "
    "any), a .pt file (a batch, or a list of batches) or file.py:function (returns batches)"
)
Data = Annotated[
    str,
    typer.Option("--data", metavar="FILE|FUNCTION", show_default=False, help=f"Batches: {_FORMS}."),
]
Batch = tuple[Any, Any]  # inputs and targets, as a training step takes them


def load_batches(text: str) -> list[Batch]:
    """Return the batches that --data names, each as (inputs, targets). Nothing in a file is executed."""
    if text.endswith(".npz"):
        found: Iterable[Any] = [_from_npz(Path(text))]
    elif text.endswith((".pt", ".pth")):
        found = _from_pt(Path(text))
    elif ":" in text:
        found = _from_function(text)
    else:
        raise ArgumentError(f"--data {text!r}: give {_FORMS}.")
    if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
        raise ArgumentError(f"--data {text!r} gives {type(found).__name__}, which is not a list of batches.")
    batches = [_batch(item) for item in islice(iter(found), MOST_BATCHES)]
    if not batches:
        raise ArgumentError(f"--data {text!r} gives no batch.")
    return batches


def _batch(item: Any) -> Batch:
    """Return (inputs, targets): a tuple of two is taken as such, anything else as inputs alone."""
    return (item[0], item[1]) if isinstance(item, (tuple, list)) and len(item) == 2 else (item, None)


def _checked(path: Path) -> Path:
    if not path.is_file():
        raise ArgumentError(f"--data: there is no file {path}.")
    return path


def _from_npz(path: Path) -> Batch:
    import numpy as np
    import torch

    try:
        with np.load(_checked(path), allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise ArgumentError(f"--data {path} is not an .npz file of plain arrays: {error}.") from error
    arrays = {name: a.float() if a.dtype is torch.float64 else a for name, a in arrays.items()}  # numpy's default
    targets = arrays.pop("targets", None)
    by_place = {name: value for name, value in arrays.items() if re.fullmatch(r"arr_\d+", name)}
    if not arrays or (by_place and len(by_place) != len(arrays)):
        raise ArgumentError(f"--data {path} must name its arrays arr_0, arr_1 …, or all by the model's arguments.")
    if not by_place:
        return arrays, targets
    ordered = sorted(by_place, key=lambda name: int(name[4:]))
    return tuple(by_place[name] for name in ordered), targets


def _from_pt(path: Path) -> Iterable[Any]:
    import torch

    try:
        found = torch.load(_checked(path), map_location="cpu", weights_only=True)
    except ArgumentError:
        raise
    except Exception as error:  # a damaged file raises anything
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError(f"--data {path} cannot be read as tensors (weights_only): {line}") from error
    return found if isinstance(found, list) else [found]


def _from_function(text: str) -> Any:
    from .target import load_attribute

    found = load_attribute(text)
    try:
        return found() if callable(found) else found
    except Exception as error:  # the user's code may raise anything
        raise ArgumentError(f"--data {text}: {type(error).__name__}: {error}") from error


def evaluate_function(text: str) -> Callable[[Any], float]:
    """Return the function that --evaluate names."""
    from .target import load_attribute

    found = load_attribute(text)
    if not callable(found):
        raise ArgumentError(f"--evaluate {text} is a {type(found).__name__}, not a function of the compiled model.")
    return found  # type: ignore[no-any-return]


def relative_error(model: Any, batches: Sequence[Batch]) -> Callable[[Any], float]:
    """Return a metric: the error of a compiled model's outputs on all batches, relative to the fp32 model's (the
    root of the sum of squares of both)."""
    import torch

    from ..common.torch_names import pytree
    from ..runtime.arguments import call_arguments

    def outputs(net: Any) -> list[torch.Tensor]:
        found = []
        with torch.no_grad():
            for inputs, _ in batches:
                args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, call_arguments(inputs))
                leaves = pytree.tree_leaves(net(*args, **kwargs))
                found += [v.double() for v in leaves if isinstance(v, torch.Tensor) and v.is_floating_point()]
        return found

    try:
        wanted = outputs(model)
    except Exception as error:  # the user's code may raise anything
        raise ArgumentError(f"The model cannot be called with the data: {type(error).__name__}: {error}") from error
    total = sum(float(v.square().sum()) for v in wanted)
    if not total:
        raise ArgumentError("The model gives only zeros, or no floating-point output, for the data.")

    def evaluate(compiled: Any) -> float:
        wrong = sum(float((a - b).square().sum()) for a, b in zip(outputs(compiled), wanted, strict=True))
        return float((wrong / total) ** 0.5)

    return evaluate
