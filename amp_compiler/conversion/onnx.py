"""A converted model as ONNX, through torch's own exporter."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import ArchiveError

if TYPE_CHECKING:
    from .converted import ConvertedModel


def to_onnx(converted: ConvertedModel, path: str | os.PathLike[str]) -> None:
    """Write ``converted`` to ``path``, weights as initializers in the precision in which they are stored."""
    target = Path(path)
    if not target.name or target.is_dir():
        raise ArchiveError(f"The model cannot be written to {str(path)!r}: give the path of a file, such as model.onnx.")
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ArchiveError("ONNX needs two more packages: pip install onnx onnxscript.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's exporter warns of its own future
            program = torch.onnx.export(converted.exported_program, dynamo=True, verbose=False)
        assert program is not None
        with tempfile.TemporaryDirectory(prefix=".amp-", dir=target.parent) as scratch:
            program.save(Path(scratch, target.name))  # weights of more than 2 GB go into a second file
            for made in sorted(Path(scratch).iterdir(), key=lambda p: p.name == target.name):
                os.replace(made, target.with_name(made.name))
    except OSError as error:
        raise ArchiveError(f"The model could not be written to {target}: {error.strerror or error}.") from error
