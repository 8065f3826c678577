"""The file of a run: everything that is needed to continue it, written as a whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..common.errors import AmpWarning, CheckpointError
from ..common.files import check_target, replacing
from ..common.messages import first_line, users_frame

FORMAT = "amp_compiler.fit"
VERSION = 1
_PARTS: dict[str, type | tuple[type, ...]] = {
    "step": dict, "scheduler": (dict, type(None)), "epochs": list, "totals": dict, "feed": dict,
}  # fmt: skip
_WHAT = "The checkpoint"


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise before the run if the file could not be written at its end."""
    check_target(path, what=_WHAT, error=CheckpointError, example="run.pt")


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> bool:
    """Write the file and return True. If that fails, as on a full disk, the file before it stays; a warning says so,
    and the run goes on."""
    try:
        with replacing(path, what=_WHAT, error=CheckpointError) as scratch, open(scratch, "wb") as file:
            try:
                torch.save({"format": FORMAT, "version": VERSION, **state}, file)
            except RuntimeError as error:  # torch's archive writer, when the file cannot be written
                raise OSError(first_line(error)) from error
    except CheckpointError as error:
        kept = f"The earlier checkpoint {path} is unchanged." if os.path.exists(path) else "There is no earlier one."
        text = f"amp_compiler: {error} The run goes on. {kept}"
        warnings.warn(text, AmpWarning, stacklevel=users_frame())
        return False
    return True


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that ``save`` wrote. Nothing of it is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be read: {error.strerror or error}. {_START_ANEW}"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or is not a checkpoint of fit() ({first_line(error, named=True)}). {_START_ANEW}"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of fit(): pass a file that fit(checkpoint=...) wrote.")
    if state.get("version") != VERSION:
        raise CheckpointError(f"{path} has the version {state.get('version')!r}; this release reads {VERSION}.")
    wrong = [name for name, kind in _PARTS.items() if not isinstance(state.get(name), kind)]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {', '.join(wrong)} is missing or of another type.")
    return state


_START_ANEW = "Continue from another file, or leave resume out to start anew."


def exists(path: str | os.PathLike[str]) -> bool:
    """True if there is a file to continue from."""
    return Path(path).is_file()
