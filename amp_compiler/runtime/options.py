"""The options of a compiled model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..policy import Policy

BACKENDS = ("auto", "eager", "inductor")


@dataclass(frozen=True)
class Options:
    """The checked arguments of one ``amp_compile`` call."""

    policy: Policy
    backend: str = "auto"
    keep_output_dtypes: bool = True
    dynamic: bool | None = None
    fullgraph: bool = False
    disable_passes: tuple[str, ...] = ()


def resolve_backend(backend: str, inputs: Sequence[Any]) -> str:
    """Return the backend; ``auto`` is inductor if one of the inputs is a CUDA tensor, eager otherwise."""
    if backend != "auto":
        return backend
    return "inductor" if any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs) else "eager"
