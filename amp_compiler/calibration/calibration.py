"""``Calibration``: the ranges and sensitivities of every op of a model on some batches, and their file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..common.errors import CalibrationError
from ..common.files import write_text
from ..policy import check_low_dtype, dtype_name
from ..runtime.record import Range

FILE_VERSION = 1
_KIND = "amp-compiler calibration"


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
        operand_gradient: The range of the gradients of its arguments, parameters included, which its backward computes;
            None without a loss.
    """

    node: str
    op: str
    module: str = ""
    source: str = ""
    result: Range = Range()
    sensitivity: float = 0.0
    gradient: Range | None = None
    operands: tuple[Range, ...] = ()
    number: int | None = None
    operand_gradient: Range | None = None

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
        return max(r.overflow for r in (self.result, self.gradient or Range()))

    @property
    def underflow(self) -> float:
        """The share of its results that low precision flushes to zero; of their gradients, if that is larger."""
        return max(r.underflow for r in (self.result, self.gradient or Range()))

    @property
    def key(self) -> tuple[str, str, str, int | None]:
        """What identifies the op in other graphs of the model: its module, name, source line and number."""
        return self.module, self.op, self.source, self.number

    def merged(self, other: Row, share: float) -> Row:
        """Return the row of both runs; ``share`` is this run's share of the batches."""
        wide = max(len(self.operands), len(other.operands))
        pairs = [(_at(self.operands, place), _at(other.operands, place)) for place in range(wide)]
        return dataclasses.replace(
            self, result=self.result.merged(other.result),
            sensitivity=share * self.sensitivity + (1 - share) * other.sensitivity,
            gradient=_both(self.gradient, other.gradient),
            operands=tuple(a.merged(b) for a, b in pairs),
            operand_gradient=_both(self.operand_gradient, other.operand_gradient),
        )  # fmt: skip

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.node} ({self.op}{where}): up to {self.max_abs:.3g}, sensitivity {self.sensitivity:.3g}"


def _both(one: Range | None, other: Range | None) -> Range | None:
    return one.merged(other) if one is not None and other is not None else one or other


def _at(ranges: tuple[Range, ...], place: int) -> Range:
    return ranges[place] if place < len(ranges) else Range()


@dataclass(frozen=True)
class Calibration:
    """What ``calibrate`` measured: one row per op of the model.

    Attributes:
        rows: One ``Row`` per op, in the order in which they ran first.
        dtype: The low-precision dtype that the shares and sensitivities are for.
        scale: The scale of the loss that the gradients' shares are for.
        batches: How many batches were run.
        model: The name of the model's class.
        has_gradients: True if there was a loss.
    """

    rows: tuple[Row, ...] = ()
    dtype: torch.dtype = torch.float16
    scale: float = 1.0
    batches: int = 0
    model: str = ""
    has_gradients: bool = False

    def merged(self, other: Calibration) -> Calibration:
        """Return the calibration over the batches of both, as of two processes that ran different ones."""
        if (self.dtype, self.model, self.has_gradients) != (other.dtype, other.model, other.has_gradients):
            raise CalibrationError(
                f"These calibrations do not belong together: {self.title()}; {other.title()}. Merge those of one "
                "model, made with the same dtype and loss."
            )
        if self.scale != other.scale:
            raise CalibrationError(
                f"These calibrations are for different scales of the loss, {self.scale:g} and {other.scale:g}: call "
                "calibrate with the same scale=."
            )
        batches = self.batches + other.batches
        share = self.batches / batches if batches else 0.5
        rows = {row.key: row for row in self.rows}
        for row in other.rows:
            known = rows.get(row.key)
            rows[row.key] = row if known is None else known.merged(row, share)
        return dataclasses.replace(self, rows=tuple(rows.values()), batches=batches)

    def __str__(self) -> str:
        from .text import table

        return table(self)

    def title(self) -> str:
        """Return in one line what was calibrated."""
        loss = f"with a loss, scale {self.scale:g}" if self.has_gradients else "without a loss"
        batches = f"{self.batches} batch" + ("es" if self.batches != 1 else "")
        return f"{self.model or 'a function'}, {dtype_name(self.dtype)}, {batches}, {loss}"

    # ------------------------------------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to ``path`` as JSON. The file is replaced as a whole or not at all."""
        write_text(path, self.to_json() + "\n", what="The calibration", error=CalibrationError)

    def to_json(self) -> str:
        """Return the calibration as JSON text."""
        head = {"kind": _KIND, "version": FILE_VERSION, "model": self.model, "dtype": dtype_name(self.dtype),
                "scale": self.scale, "batches": self.batches, "has_gradients": self.has_gradients,
                "number_of_rows": len(self.rows)}  # fmt: skip
        rows = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps({**head, "rows": rows}, indent=1, allow_nan=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration from ``path``, a file that ``save`` wrote. Nothing of it is executed."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise CalibrationError(f"The calibration {path} cannot be read: {error.strerror or error}.") from error
        except UnicodeDecodeError:
            raise CalibrationError(f"{path} is not a calibration: {_GIVE}") from None
        return cls.from_json(text, where=str(path))

    @classmethod
    def from_json(cls, text: str, where: str = "The text") -> Calibration:
        """Make a calibration from ``text``, which ``to_json`` returned. ``where``: what an error names."""
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise CalibrationError(f"{where} is damaged or is not a calibration ({error}): {_GIVE}") from None
        if not isinstance(data, dict) or data.get("kind") != _KIND:
            raise CalibrationError(f"{where} is not a calibration: {_GIVE}")
        if data.get("version") != FILE_VERSION:
            raise CalibrationError(
                f"{where} has the version {data.get('version')!r}; this release reads {FILE_VERSION}. Update "
                "amp-compiler, or calibrate again."
            )
        try:
            rows = tuple(_row(row) for row in _typed(data, "rows", list))
            if len(rows) != _typed(data, "number_of_rows", int):
                raise ValueError("rows are missing")
            return cls(
                rows, check_low_dtype(_typed(data, "dtype", str)), _number(data, "scale"), _count(data, "batches"),
                _typed(data, "model", str), _typed(data, "has_gradients", bool),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise CalibrationError(f"{where} is damaged ({what}): {_GIVE}") from None


_GIVE = "give a file that Calibration.save or `amp-compiler calibrate` wrote."


def _typed(data: Any, key: str, kind: type[Any]) -> Any:
    if not isinstance(data, Mapping):
        raise TypeError("an object was expected")
    value = data[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{key} is {value!r}")
    return value


def _number(data: Any, key: str) -> float:
    value = float(_typed(data, key, (int, float)))  # type: ignore[arg-type]
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{key} is {value}")
    return value


def _count(data: Any, key: str) -> int:
    value: int = _typed(data, key, int)
    if value < 0:
        raise ValueError(f"{key} is {value}")
    return value


def _range(data: Any) -> Range:
    pairs = []
    for pair in _typed(data, "exponents", list):
        exponent, number = pair
        if type(exponent) is not int or type(number) is not int or number < 0:
            raise ValueError(f"exponents have {pair!r}")
        pairs.append((exponent, number))
    counts = [_count(data, key) for key in ("overflows", "flushed", "subnormals", "infinite", "batch")]
    largest, smallest = _number(data, "max_abs"), _number(data, "min_nonzero")
    return Range(_count(data, "elements"), largest, smallest, *counts, tuple(pairs))


def _row(data: Any) -> Row:
    texts = [_typed(data, key, str) for key in ("node", "op", "module", "source")]
    return Row(
        *texts, result=_range(data["result"]), sensitivity=_number(data, "sensitivity"),
        gradient=None if data["gradient"] is None else _range(data["gradient"]),
        operands=tuple(_range(r) for r in _typed(data, "operands", list)),
        number=None if data["number"] is None else _count(data, "number"),
        operand_gradient=None if data["operand_gradient"] is None else _range(data["operand_gradient"]),
    )  # fmt: skip
