"""The rules that measured ranges ask for: ops whose values do not fit go to fp32, harmless ones may go low."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from ..common.errors import AmpWarning, PolicyError
from ..common.messages import users_frame
from .calls import CallRule
from .dtypes import dtype_name
from .levels import Treatment
from .ops.row import OpClass, Row

#: the largest error of a gradient, as a share of it, that leaves two of its bits
_LEAST_BITS = 0.25
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Range(Protocol):
    """The range of values over some batches; ``amp_compiler.runtime.record.Range`` is one."""

    @property
    def elements(self) -> int: ...
    @property
    def max_abs(self) -> float: ...
    @property
    def min_nonzero(self) -> float: ...
    @property
    def batch(self) -> int: ...


class Measured(Protocol):
    """One op of a calibration."""

    @property
    def op(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def number(self) -> int | None: ...
    @property
    def result(self) -> Range: ...
    @property
    def operands(self) -> Sequence[Range]: ...
    @property
    def gradient(self) -> Range | None: ...
    @property
    def operand_gradients(self) -> Sequence[Range]: ...
    @property
    def sensitivity(self) -> float: ...
    @property
    def cancellation(self) -> float: ...


class Measurements(Protocol):
    """A calibration; ``amp_compiler.Calibration`` is one."""

    @property
    def rows(self) -> Sequence[Measured]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def scale(self) -> float: ...
    @property
    def batches(self) -> int: ...


class Standing(NamedTuple):
    """What a policy does with an op as long as nothing is measured."""

    cls: OpClass
    treatment: Treatment
    row: Row | None


def rules_for(
    calibration: Measurements, low: torch.dtype, margin: float, standing: Callable[[str], Standing]
) -> list[CallRule]:
    """Return the rules that a calibration asks for. A warning says so if no scale of the loss suits all gradients."""
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 1 <= margin < math.inf:
        raise PolicyError(f"margin must be a number of at least 1, not {margin!r}.")
    if not hasattr(calibration, "rows") or not hasattr(calibration, "scale"):
        raise PolicyError(f"Policy.calibrated takes an amp_compiler.Calibration, not {type(calibration).__name__}.")
    found: dict[tuple[str, str, int | None], CallRule] = {}
    several = Counter((row.module, row.op) for row in calibration.rows)
    bounds = Bounds(low, margin)
    usual = _usual_sensitivity(calibration.rows, standing)
    lost = 0
    for row in calibration.rows:
        number = row.number if several[row.module, row.op] > 1 else None
        state = standing(row.op)
        if state.cls in (OpClass.EXACT, OpClass.KEEP) or (state.row is not None and state.row.fp32_only):
            continue  # it follows its input, or cannot be changed
        why = bounds.forward(row)
        if why is None and (why := bounds.backward(row, calibration.scale)) is not None and _is_low(state):
            lost += 1
        why = why or bounds.cancels(row)
        if why is not None:
            if not _is_fp32(state):
                found[row.module, row.op, number] = CallRule(row.module, row.op, "float32", number, why)
        elif harmless := _harmless(row, state, bounds, usual, calibration.batches):
            key = row.module, row.op, number
            found.setdefault(key, CallRule(*key[:2], dtype_name(low), number, harmless, yields=True))
    if lost:
        warnings.warn(
            f"amp_compiler: no scale of the loss suits all gradients: at {calibration.scale:g}, those of {lost} of "
            f"{len(calibration.rows)} ops overflow or vanish in {_SHORT[low]}. These ops run in fp32; bf16 needs no "
            "scale.", AmpWarning, stacklevel=users_frame(),
        )  # fmt: skip
    return list(found.values())


class Bounds:
    """What a low-precision dtype holds, with a margin."""

    def __init__(self, low: torch.dtype, margin: float) -> None:
        self.name, self.margin = _SHORT[low], margin
        self.largest, self.smallest = torch.finfo(low).max, torch.finfo(low).smallest_normal
        self.roundoff = torch.finfo(low).eps / 2
        self.zero = self.smallest * torch.finfo(low).eps / 2  # what is not larger is rounded to zero

    def forward(self, row: Measured) -> str | None:
        """Return why the results or operands of an op do not fit, in figures; None if they do."""
        for values, verb in ((row.result, "reaches"), *((r, "reads values up to") for r in row.operands)):
            if values.max_abs * self.margin > self.largest:
                return self._too_large(values, verb)
        if self._vanishes(row.result.max_abs):
            return (f"stays below {row.result.max_abs:.2g}; {self.name} has its full precision above "
                    f"{self.smallest:.2g}")  # fmt: skip
        return None

    def backward(self, row: Measured, scale: float) -> str | None:
        """Return why the gradients of an op do not fit at the scale of the loss; None if they do."""
        for values in (row.gradient, *row.operand_gradients):
            if values is None or not values.elements:
                continue
            at = f" at a loss scale of {scale:g}" if scale != 1 else ""
            if values.max_abs * self.margin > self.largest:
                return self._too_large(values, "has gradients up to", at)
            if self._vanishes(values.max_abs):
                return (f"has gradients up to {values.max_abs:.2g}{at}; {self.name} has its full precision above "
                        f"{self.smallest:.2g}")  # fmt: skip
        return None

    def cancels(self, row: Measured) -> str | None:
        """Return why a gradient that is a sum would be lost to the rounding of its parts: fewer than two of its bits
        would be left. None if it is not."""
        if row.cancellation * self.roundoff * self.margin < _LEAST_BITS:
            return None
        return (f"its gradient is a sum that cancels: its parts are {row.cancellation:.2g} times as large, and "
                f"{self.name} rounds them by up to 1 in {1 / self.roundoff:g}")  # fmt: skip

    def excess(self, row: Measured) -> float:
        """Return how many times too large the values or gradients of an op are, or too small, whichever is more."""
        own = [r for r in (row.result, row.gradient, *row.operand_gradients) if r is not None and r.max_abs]
        large = [r.max_abs / self.largest for r in (*own, *row.operands)]
        return max([*large, *(self.smallest / r.max_abs for r in own), row.cancellation * self.roundoff], default=0.0)

    def loses_nothing(self, ranges: Iterable[Range]) -> bool:
        """True if no value is flushed to zero, with the margin."""
        return all(not r.min_nonzero or r.min_nonzero > self.zero * self.margin for r in ranges)

    def _vanishes(self, largest: float) -> bool:
        return 0 < largest < self.smallest * self.margin

    def _too_large(self, values: Range, verb: str, at: str = "") -> str:
        over = "" if values.max_abs > self.largest else f", with a margin of {self.margin:g}"
        return f"{verb} {values.max_abs:.2g} in batch {values.batch}{at}; {self.name} holds {self.largest:.6g}{over}"


def _harmless(row: Measured, state: Standing, bounds: Bounds, usual: float, batches: int) -> str | None:
    """Return why an op of the black list can run low: all its values fit, nothing is flushed to zero, and its rounding
    matters no more than that of ops that run low anyway. None if it should stay, as one that returns a single number
    (a loss) always does."""
    if state.cls is not OpClass.FP32 or state.treatment.asks_for_low or (state.row is not None and state.row.banned):
        return None
    if row.result.elements <= batches or not 0 < row.sensitivity <= usual:
        return None
    if not bounds.loses_nothing((row.result, *row.operands)):
        return None
    return (f"on the black list, but harmless here: stays between {row.result.min_nonzero:.2g} and "
            f"{row.result.max_abs:.2g} in {batches} {'batch' if batches == 1 else 'batches'}")  # fmt: skip


def _usual_sensitivity(rows: Sequence[Measured], standing: Callable[[str], Standing]) -> float:
    """Return the largest sensitivity of the ops that run low without a calibration."""
    return max((row.sensitivity for row in rows if _is_low(standing(row.op))), default=0.0)


def _is_fp32(state: Standing) -> bool:
    """True if the level runs the op in fp32 whatever its inputs are."""
    inside = state.row is not None and state.row.fp32_inside
    return state.treatment is Treatment.FP32 or (state.treatment is Treatment.FP32_LOW_OUTSIDE and not inside)


def _is_low(state: Standing) -> bool:
    return state.treatment.asks_for_low or state.treatment is Treatment.LOWEST_INPUT
