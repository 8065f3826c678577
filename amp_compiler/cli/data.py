"""--data: batches for a model, from files or from a function of the user's."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..common.errors import ArgumentError
from ..common.torch_names import pytree
from .target import load_attribute

_FORMS = "inputs.npz, batches.pt or file.py:function"
_TARGETS = "targets"  # the array of an .npz file that is not an input


def load_batches(sources: Sequence[str], batch_size: int | None = None) -> Iterator[Any]:
    """Yield the batches of all sources, as ``(inputs, targets)``; with a ``batch_size``, those of files in parts."""
    for source in sources:
        batches = _of_file(source) if source.endswith((".npz", ".pt", ".pth")) else _of_function(source)
        for batch in batches:
            yield from _parts(batch, batch_size) if batch_size is not None else (batch,)


def _of_file(source: str) -> Iterable[Any]:
    path = Path(source)
    if not path.is_file():
        raise ArgumentError(f"--data {source}: there is no such file. Forms: {_FORMS}.")
    if path.suffix == ".npz":
        return [_of_arrays(path)]
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError(
            f"--data {source} cannot be read: {line} It must hold tensors in lists, tuples and dicts, as torch.save "
            "writes them; nothing else is loaded."
        ) from None
    return found if isinstance(found, list) else [found]


def _of_arrays(path: Path) -> Any:
    """Return the batch of an .npz file: arrays named ``targets``, ``arr_0``, ``arr_1`` … in order, or by argument."""
    import numpy

    try:
        with numpy.load(path, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ArgumentError(f"--data {path} cannot be read as arrays of numbers: {error}") from None
    if not arrays:
        raise ArgumentError(f"--data {path} holds no array.")
    arrays = {name: a.float() if a.dtype is torch.float64 else a for name, a in arrays.items()}
    targets = arrays.pop(_TARGETS, None)
    if all(name.startswith("arr_") for name in arrays):
        return tuple(arrays[name] for name in sorted(arrays, key=lambda n: int(n.removeprefix("arr_")))), targets
    return arrays, targets


def _of_function(source: str) -> Iterable[Any]:
    if ":" not in source:
        raise ArgumentError(f"--data {source!r}: write {_FORMS}.")
    found = load_attribute(source)
    batches = found() if callable(found) else found
    if not isinstance(batches, Iterable) or isinstance(batches, torch.Tensor):
        raise ArgumentError(f"--data {source} gives a {type(batches).__name__}, not an iterable of (inputs, targets).")
    return batches


def _parts(batch: Any, size: int) -> Iterator[Any]:
    """Yield a batch in parts of ``size`` samples, split along the first dimension of every tensor."""
    leaves, spec = pytree.tree_flatten(batch)
    lengths = {len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(lengths) != 1:
        raise ArgumentError(f"--batch-size: the tensors of a batch have {sorted(lengths)} samples; they must agree.")
    for start in range(0, lengths.pop(), size):
        part = [x[start : start + size] if isinstance(x, torch.Tensor) and x.dim() else x for x in leaves]
        yield pytree.tree_unflatten(part, spec)
