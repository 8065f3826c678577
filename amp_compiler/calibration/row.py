"""``Row``: one op of a calibration."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from ..runtime.record import Range

_NONE = Range()


@dataclass(frozen=True, slots=True)
class Row:
    """One op of the model, over all batches, and over all graphs that were captured for different shapes.

    Attributes:
        node: The name of its node in the first graph that has it.
        op: Its ATen name, without overload.
        module: The path of the module that calls it.
        source: The line of the user's code.
        result: The range of its results.
        sensitivity: The expected square of the change of the loss, to first order, if this op alone ran in low
            precision: of the gradient times the rounding error of its result, and the same of its operands. If the
            model was run without a loss, of the change of its outputs.
        gradient: The range of the gradients of its results, times the scale of the loss; None without a loss.
        operands: The ranges of its floating-point arguments, in order.
        number: Which of its module's calls of this op it is, counted from 0 in the graph that has it.
        operand_gradients: The ranges of the gradients of its arguments, parameters included, which its backward
            computes, in the order of ``operands``; empty for an argument that training computes none for.
        cancellation: How many times as large as the gradient of its result the parts are that this is the sum of, where
            the result is read in several places; 0 where it is not.
    """

    node: str
    op: str
    module: str = ""
    source: str = ""
    result: Range = _NONE
    sensitivity: float = 0.0
    gradient: Range | None = None
    operands: tuple[Range, ...] = ()
    number: int | None = None
    operand_gradients: tuple[Range, ...] = ()
    cancellation: float = 0.0

    @property
    def max_abs(self) -> float:
        """The largest magnitude of its results in fp32."""
        return self.result.max_abs

    @property
    def min_nonzero(self) -> float:
        """The smallest magnitude of its results other than zero; 0 if all of them are zero."""
        return self.result.min_nonzero

    @property
    def overflow(self) -> float:
        """The share of its results that overflow in low precision; of their gradients, if that is larger."""
        return max(r.overflow for r in (self.result, self.gradient or _NONE))

    @property
    def underflow(self) -> float:
        """The share of its results that low precision flushes to zero; of their gradients, if that is larger."""
        return max(r.underflow for r in (self.result, self.gradient or _NONE))

    @property
    def key(self) -> tuple[str, str, str, int | None]:
        """What identifies the op in other graphs of the model: its module, name, source line and number."""
        return self.module, self.op, self.source, self.number

    def merged(self, other: Row, share: float) -> Row:
        """Return the row of both runs; ``share`` is this run's share of the batches."""
        return dataclasses.replace(
            self, result=self.result.merged(other.result),
            sensitivity=share * self.sensitivity + (1 - share) * other.sensitivity,
            gradient=_both(self.gradient, other.gradient),
            operands=_each(self.operands, other.operands),
            operand_gradients=_each(self.operand_gradients, other.operand_gradients),
            cancellation=max(self.cancellation, other.cancellation),
        )  # fmt: skip

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.node} ({self.op}{where}): up to {self.max_abs:.3g}, sensitivity {self.sensitivity:.3g}"


def _both(one: Range | None, other: Range | None) -> Range | None:
    return one.merged(other) if one is not None and other is not None else one or other


def _each(some: tuple[Range, ...], others: tuple[Range, ...]) -> tuple[Range, ...]:
    return tuple(a.merged(b) for a, b in itertools.zip_longest(some, others, fillvalue=_NONE))
