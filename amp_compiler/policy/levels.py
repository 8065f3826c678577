"""The levels, one row each: how a level treats each class of ops.

To add a level, add a row to ``LEVELS`` and document it; nothing else names levels.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..common.errors import ArgumentError
from ..common.messages import suggestion
from .ops.row import OpClass


class Treatment(enum.Enum):
    """How a level runs the ops of one class."""

    UNTOUCHED = "untouched"  # as they were traced
    FP32 = "fp32"  # in fp32
    FP32_LOW_OUTSIDE = "fp32, low outside"  # in fp32, or low in and out where torch's kernel is fp32 inside
    LOWEST_INPUT = "low if all inputs are low"  # low if all its inputs are low already, else fp32
    LOW_UNLESS_WIDE = "low unless wide"  # low, unless it reads the result of an fp32 op
    LOW = "low"  # low wherever low precision can represent its constants

    @property
    def asks_for_low(self) -> bool:
        """True if an op that reads fp32 values may be made low by the level."""
        return self in (Treatment.LOW, Treatment.LOW_UNLESS_WIDE)


@dataclass(frozen=True, slots=True)
class Level:
    """One level. ``low``, ``fp32``, ``follow``: the treatment of the op classes LOW, FP32 and FOLLOW; ops that move
    values (EXACT) follow their input at every level. ``low_model``: the model counts as low, so code that asks for the
    dtype of a value sees the low-precision dtype, and a conversion stores lookup tables in it.
    """

    name: str
    low: Treatment
    fp32: Treatment
    follow: Treatment
    low_model: bool = False

    def treatment(self, cls: OpClass | None) -> Treatment:
        """Return how the level treats ops of this class."""
        return {OpClass.LOW: self.low, OpClass.FP32: self.fp32, OpClass.FOLLOW: self.follow}.get(
            cls or OpClass.KEEP, Treatment.UNTOUCHED
        )

    @property
    def rewrites(self) -> bool:
        """False for a level that leaves everything as it is."""
        return self.low is not Treatment.UNTOUCHED

    @property
    def keeps_wide(self) -> bool:
        """True if results of fp32 ops stay fp32 until a white-listed op reads them."""
        return self.follow is Treatment.LOW_UNLESS_WIDE

    def says(self, cls: OpClass) -> str:
        """Return how the level treats ops of a class, as a sentence; empty if it says nothing about them."""
        if not self.rewrites:
            return f"level {self.name} touches nothing"
        everything = self.fp32 is Treatment.LOW and cls in (OpClass.LOW, OpClass.FP32, OpClass.FOLLOW)
        told = "runs everything that it can in low precision" if everything else _WORDS.get((cls, self.treatment(cls)))
        return f"level {self.name} {told}" if told else ""


_WORDS = {
    (OpClass.LOW, Treatment.LOW): "runs the white list in low precision",
    (OpClass.LOW, Treatment.LOW_UNLESS_WIDE): "runs the white list in low precision, unless it reads a wide value",
    (OpClass.LOW, Treatment.LOWEST_INPUT): "runs the white list low where all its inputs are low",
    (OpClass.LOW, Treatment.FP32): "runs the white list in fp32",
    (OpClass.FP32, Treatment.FP32): "runs the black list in fp32",
    (OpClass.FP32, Treatment.FP32_LOW_OUTSIDE):
        "runs the black list in fp32, low in and out where torch's kernel is fp32 inside",
    (OpClass.FOLLOW, Treatment.FP32): "keeps other arithmetic in fp32",
    (OpClass.FOLLOW, Treatment.LOWEST_INPUT): "runs other arithmetic low where all its inputs are low",
    (OpClass.FOLLOW, Treatment.LOW_UNLESS_WIDE):
        "runs other arithmetic in low precision, unless it reads the result of an fp32 op",
    (OpClass.FOLLOW, Treatment.LOW): "runs other arithmetic in low precision",
}  # fmt: skip

_ROWS = (
    Level("O0", low=Treatment.UNTOUCHED, fp32=Treatment.UNTOUCHED, follow=Treatment.UNTOUCHED),
    Level("O1", low=Treatment.LOW, fp32=Treatment.FP32, follow=Treatment.FP32),
    Level("auto", low=Treatment.LOW, fp32=Treatment.FP32, follow=Treatment.LOWEST_INPUT),
    Level("O2", low=Treatment.LOW, fp32=Treatment.FP32_LOW_OUTSIDE, follow=Treatment.LOW_UNLESS_WIDE, low_model=True),
    Level("O3", low=Treatment.LOW, fp32=Treatment.LOW, follow=Treatment.LOW, low_model=True),
)
#: name -> level, from the one that changes least to the one that changes most
LEVELS = {level.name: level for level in _ROWS}
#: the level of every public function, unless another is asked for
DEFAULT_LEVEL = "O2"


def check_level(level: object) -> str:
    """Return ``level`` if it is one; otherwise raise an error that names the closest match."""
    if isinstance(level, str) and level in LEVELS:
        return level
    names = {name.lower(): name for name in LEVELS}
    given = names.get(str(level).lower(), str(level))
    hint = suggestion(given, LEVELS, cutoff=0.4, otherwise=suggestion(given.upper(), LEVELS, cutoff=0.4))
    raise ArgumentError(f"Unknown level {level!r}: choose one of {', '.join(LEVELS)}.", hint=hint)
