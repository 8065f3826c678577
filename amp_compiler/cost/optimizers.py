"""What an optimizer keeps and moves, in bytes for each parameter, if all of it is fp32."""

from __future__ import annotations

from typing import NamedTuple

from ..common.errors import ArgumentError
from ..common.messages import suggestion


class Optimizer(NamedTuple):
    """``kept``: its state. ``moved``: what an update reads and writes: the weight, its gradient and the state."""

    kept: int
    moved: int


OPTIMIZERS = {"none": Optimizer(0, 0), "sgd": Optimizer(0, 12), "momentum": Optimizer(4, 20), "adamw": Optimizer(8, 28)}


def find_optimizer(name: str) -> Optimizer:
    """Return the row of a name; an ``ArgumentError`` suggests the nearest."""
    if name not in OPTIMIZERS:
        raise ArgumentError(
            f"Unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}.",
            hint=suggestion(str(name), OPTIMIZERS),
        )
    return OPTIMIZERS[name]
