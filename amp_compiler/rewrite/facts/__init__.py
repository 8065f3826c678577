"""The facts that passes require and ensure, each with its check; ``passes/README.md`` lists them."""

from __future__ import annotations

from ..base import Fact
from . import conversion, forward, functional, parallel, sharded, training
from .conversion import FROZEN
from .forward import ASSIGNED, CAPTURED, CAST, NORMALIZED, ORIGIN, PLACED
from .functional import BATCHED, FOLDED, FUNCTIONAL, FUSED, LOWERED, PAST_AUTOGRAD, VIEWED
from .parallel import REDUCED, REDUCED_IN_PLACE
from .sharded import GATHERED, SCATTERED
from .training import ACCUMULATED, HOISTED, IN_PLACE, SCALED, STEP, WIDENED

#: name -> fact, for all facts of this package
ALL: dict[str, Fact] = {
    value.name: value
    for family in (forward, conversion, functional, training, parallel, sharded)
    for value in vars(family).values()
    if isinstance(value, Fact)
}

__all__ = [
    "ACCUMULATED",
    "ALL",
    "ASSIGNED",
    "BATCHED",
    "CAPTURED",
    "CAST",
    "FOLDED",
    "FROZEN",
    "FUNCTIONAL",
    "FUSED",
    "GATHERED",
    "HOISTED",
    "IN_PLACE",
    "LOWERED",
    "NORMALIZED",
    "ORIGIN",
    "PAST_AUTOGRAD",
    "PLACED",
    "REDUCED",
    "REDUCED_IN_PLACE",
    "SCALED",
    "SCATTERED",
    "STEP",
    "VIEWED",
    "WIDENED",
]
