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
from .page import page
from .row import Row as Row
from .text import table

FILE_VERSION = 1
_KIND = "amp-compiler calibration"


@dataclass(frozen=True)
class Calibration:
    """What ``calibrate`` measured: one row per op of the model. It prints as a table.

    Attributes:
        rows: One ``Row`` per op, in the order in which they ran first.
        dtype: The low-precision dtype that the shares and sensitivities are for.
        scale: The scale of the loss that the gradients' shares are for.
        batches: How many batches were run.
        model: The name of the model's class.
        has_gradients: True if there was a loss.

    Examples:
        >>> import torch
        >>> from amp_compiler import Policy, calibrate
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
        >>> found = calibrate(model, [torch.ones(2, 4)])
        >>> [(row.op, row.max_abs < 10, row.overflow) for row in found.rows]
        [('linear', True, 0.0), ('tanh', True, 0.0)]
        >>> Policy.calibrated(found).calls
        ()
    """

    rows: tuple[Row, ...] = ()
    dtype: torch.dtype = torch.float16
    scale: float = 1.0
    batches: int = 0
    model: str = ""
    has_gradients: bool = False

    def merged(self, other: Calibration) -> Calibration:
        """Return the calibration over the batches of this and of ``other``, as of two processes."""
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
        return table(self.title(), self.rows)

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

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return one self-contained HTML page: the ops coloured by range and sensitivity, with a histogram of exponents
        on a click. It is also written to ``path`` if one is given.
        """
        text = page(self.title(), self.rows, self.dtype)
        if path is not None:
            write_text(path, text, what="The page", error=CalibrationError)
        return text

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
    return Range(
        _count(data, "elements"), _number(data, "max_abs"), _number(data, "min_nonzero"), _count(data, "overflows"),
        _count(data, "flushed"), _count(data, "subnormals"), _count(data, "infinite"), _count(data, "batch"),
        tuple(pairs),
    )  # fmt: skip


def _row(data: Any) -> Row:
    return Row(
        _typed(data, "node", str), _typed(data, "op", str), _typed(data, "module", str), _typed(data, "source", str),
        result=_range(data["result"]), sensitivity=_number(data, "sensitivity"),
        gradient=None if data["gradient"] is None else _range(data["gradient"]),
        operands=tuple(_range(r) for r in _typed(data, "operands", list)),
        number=None if data["number"] is None else _count(data, "number"),
        operand_gradients=tuple(_range(r) for r in _typed(data, "operand_gradients", list)),
        cancellation=_number(data, "cancellation") if "cancellation" in data else 0.0,  # older files have none
    )  # fmt: skip
