"""--data: batches for a model, from a file or from a Python function."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any
from zipfile import BadZipFile

import typer

from ..common.errors import AmpWarning, ArgumentError

#: batches that are taken unless the user says how many
MOST_BATCHES = 128
_FORMS = (
    "a .npz file (one array per argument of the model: arr_0, arr_1 … by position, or by name; 'targets' if there are "
    "any), a .pt file (a batch, or a list of batches) or file.py:function (returns a batch, or an iterable of them). "
    "A batch is inputs or (inputs, targets); inputs are a tensor, a tuple of arguments or a dict by name"
)
Data = Annotated[
    str,
    typer.Option("--data", metavar="FILE|FUNCTION", show_default=False, help=f"Batches: {_FORMS}."),
]
Batch = tuple[Any, Any]  # inputs and targets, as a training step takes them
Kinds = Mapping[str, str]  # dtype and shape by argument
_UNKNOWN: Kinds = MappingProxyType({})


def load_batches(text: str, most: int | None = None) -> list[Batch]:
    """Return the batches that --data names, each as (inputs, targets): the first ``most`` of them. Without a number,
    the first 128, and a note says so if there are more. Nothing in a file is executed."""
    if text.endswith(".npz"):
        found: Any = [_from_npz(Path(text))]
    elif text.endswith((".pt", ".pth")):
        found = _from_pt(Path(text))
    elif ":" in text:
        found = _from_function(text)
    else:
        raise ArgumentError(f"--data {text!r}: give {_FORMS}.")
    from ..runtime.arguments import split_batch

    if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
        raise ArgumentError(f"--data {text!r} gives {type(found).__name__}, which is not a list of batches.")
    items: list[Any] = []
    try:
        items.extend(islice(iter(found), (most or MOST_BATCHES) + 1))
    except Exception as error:  # the user's code may raise anything
        from .target import raised

        raise ArgumentError(f"--data {text}: batch {len(items) + 1} raised {raised(error)}") from error
    if not items:
        raise ArgumentError(f"--data {text!r} gives no batch.")
    if most is None and len(items) > MOST_BATCHES:
        warnings.warn(
            f"amp_compiler: --data {text} gives more than {MOST_BATCHES} batches: the first {MOST_BATCHES} are used.",
            AmpWarning, stacklevel=2,
        )  # fmt: skip
    return [split_batch(item, number) for number, item in enumerate(items[: most or MOST_BATCHES], 1)]


def _checked(path: Path) -> Path:
    if not path.is_file():
        raise ArgumentError(f"--data: there is no file {path}.")
    if not path.stat().st_size:
        raise ArgumentError(f"--data: the file {path} is empty.")
    return path


def _from_npz(path: Path) -> Batch:
    import numpy as np
    import torch

    try:
        with np.load(_checked(path), allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise ArgumentError(f"--data {path} is not an .npz file of plain arrays: {str(error).rstrip('.')}.") from error
    arrays = {name: a.float() if a.dtype is torch.float64 else a for name, a in arrays.items()}  # numpy's default
    targets = arrays.pop("targets", None)
    by_place = {name: value for name, value in arrays.items() if re.fullmatch(r"arr_\d+", name)}
    if not arrays or (by_place and len(by_place) != len(arrays)):
        has = ", ".join([*arrays, *(["targets"] if targets is not None else [])]) or "none"
        raise ArgumentError(
            f"--data {path} must name its arrays arr_0, arr_1 …, or all by the model's arguments; it has {has}."
        )
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
    return _several(found)


def _several(found: Any) -> Iterable[Any]:
    """Return a list of batches for what may be a single batch: a tensor, a tuple or a dict."""
    import torch

    return [found] if isinstance(found, (torch.Tensor, tuple, Mapping)) else found


def _from_function(text: str) -> Any:
    from .target import load_attribute, raised

    found = load_attribute(text)
    try:
        return _several(found() if callable(found) else found)
    except Exception as error:  # the user's code may raise anything
        raise ArgumentError(f"--data {text}: {raised(error)}") from error


def evaluate_function(text: str) -> Callable[[Any], float]:
    """Return the function that --evaluate names."""
    from .target import load_attribute

    found = load_attribute(text)
    if not callable(found):
        raise ArgumentError(f"--evaluate {text} is a {type(found).__name__}, not a function of the compiled model.")
    return found  # type: ignore[no-any-return]


def relative_error(model: Any, batches: Sequence[Batch], example: Kinds = _UNKNOWN) -> Callable[[Any], float]:
    """Return a metric: the error of a compiled model's outputs on all batches, relative to the fp32 model's (the
    root of the sum of squares of both). ``example``: inputs that the model takes, as ``kinds`` has them."""
    import torch

    from ..calibration.refusal import kinds, refusal
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

    known, where = example, "in the example inputs"
    for number, (inputs, _) in enumerate(batches, 1):
        args, kwargs = call_arguments(inputs)
        if (refused := refusal(model, args, kwargs, number, known, where)) is not None:
            raise refused
        known, where = kinds(model, args, kwargs), f"in batch {number}"
    wanted = outputs(model)
    if not all(bool(v.isfinite().all()) for v in wanted):
        raise ArgumentError("In fp32, the outputs of the model for the data have NaN or infinities: no error can be "
                            "relative to them. Correct the data or the model.")  # fmt: skip
    total = sum(float(v.square().sum()) for v in wanted)
    if not total:
        shapes = ", ".join(f"{name} is {text}" for name, text in known.items())
        raise ArgumentError(f"The model gives only zeros, or no floating-point output, for the data: {shapes}.")

    def evaluate(compiled: Any) -> float:
        wrong = sum(float((a - b).square().sum()) for a, b in zip(outputs(compiled), wanted, strict=True))
        return float((wrong / total) ** 0.5)

    return evaluate
