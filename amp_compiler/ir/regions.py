"""Regions of a model's code whose precision its author chose, as ``normalize`` writes them on nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..policy import dtype_name


@dataclass(frozen=True, slots=True)
class Region:
    """A region of code whose precision the model's author chose. dtype None: autocast switched off.

    ``depth``: how many modules were on the stack where it began; a mark on a deeper module is inside it.
    """

    kind: str  # "precision", "autocast", or "level" for O0 inside other levels
    dtype: torch.dtype | None
    depth: int = 1  # the model itself is around everything

    def __str__(self) -> str:
        if self.kind == "level":
            return "level O0: untouched"
        if self.kind == "precision":
            return f"precision({dtype_name(self.dtype)!r}) scope" if self.dtype else "precision scope"
        return f"torch.autocast(dtype={self.dtype}) region" if self.dtype else "torch.autocast(enabled=False) region"
