"""``Health``: how much of a training step's arithmetic is lost to rounding, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.errors import ArgumentError
from ..common.files import write_text
from ..policy import dtype_name
from ..runtime.record import Range
from .underflow import better_scale, scale_advice

_KIND, _VERSION = "amp-compiler health", 1
_SHOWN = 12  # rows of a table
#: a share from which on a row is worth a line
_MUCH = 0.01
#: numbers within this factor of the largest one count as near it
_NEAR = 3  # powers of two
_NO_VALUES = Range()


@dataclass(frozen=True, slots=True)
class ParameterHealth:
    """One parameter.

    Attributes:
        name: Its path in the model.
        dtype: Of the tensor that the optimizer updates.
        updates: How many of its elements had a gradient and should have moved.
        lost: How many of them stayed as they were: the update was too small beside the element.
        gradients: How many of its gradients were computed in low precision and are not zero.
        flushed: How many of them low precision rounds to zero.
    """

    name: str
    dtype: str = ""
    updates: int = 0
    lost: int = 0
    gradients: int = 0
    flushed: int = 0

    @property
    def lost_share(self) -> float:
        """The share of the updates that are lost to rounding."""
        return self.lost / self.updates if self.updates else 0.0

    @property
    def flushed_share(self) -> float:
        """The share of the gradients that are flushed to zero."""
        return self.flushed / self.gradients if self.gradients else 0.0


@dataclass(frozen=True, slots=True)
class OpHealth:
    """The results of one op that the step holds in low precision.

    Attributes:
        op: Its name.
        module: The path of the module that calls it.
        source: The line of the user's code.
        dtype: What its results are held in.
        values: Their range in fp32; of large tensors, that of an even sample.
    """

    op: str
    module: str
    source: str
    dtype: str
    values: Range

    @property
    def near_overflow(self) -> float:
        """The share of the values that are within a factor of eight of the largest number, or beyond it."""
        limit = torch.finfo(getattr(torch, self.dtype)).max
        near = sum(count for e, count in self.values.exponents if 2.0 ** (e + _NEAR) > limit / 2)
        return near / self.values.elements if self.values.elements else 0.0

    @property
    def near_zero(self) -> float:
        """The share of the values that are subnormal, with fewer bits, or are flushed to zero."""
        return self.values.underflow + self.values.subnormal

    @property
    def name(self) -> str:
        """The op and where it is."""
        return f"{self.module}: {self.op}" if self.module else self.op


@dataclass(frozen=True)
class Health:
    """What ``step.health()`` found; prints as a short text. False in a condition if nothing is worth a line.

    Attributes:
        parameters: One ``ParameterHealth`` per parameter that is trained.
        ops: One ``OpHealth`` per op whose results are held in low precision, in the order in which they ran.
        dtype: The low-precision dtype.
        scale: The present loss scale.
        samples: How many updates were sampled for lost updates.
        looks: How many batches were run once more in fp32, for gradients and activations.
        every: The period of the samples; None if nothing is sampled, and the figures are those of the last update.
        gradients: The range of all gradients in low precision, times the scale.
        notes: What could not be measured, and why.
    """

    parameters: tuple[ParameterHealth, ...] = ()
    ops: tuple[OpHealth, ...] = ()
    dtype: torch.dtype = torch.float16
    scale: float = 1.0
    samples: int = 0
    looks: int = 0
    every: int | None = None
    gradients: Range = _NO_VALUES
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.advice)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, one line per trouble."""
        return tuple(self._advice())

    def _advice(self) -> Iterator[str]:
        lost = sorted((p for p in self.parameters if p.lost_share >= _MUCH), key=lambda p: -p.lost_share)
        if low := [p for p in lost if p.dtype in ("float16", "bfloat16")]:
            yield (
                f"Updates of {_named([p.name for p in low])} are too small for {low[0].dtype}, up to "
                f"{low[0].lost_share:.0%} of them: keep fp32 weights (master_weights=True, or model.float()), or round "
                "stochastically."
            )
        if wide := [p for p in lost if p not in low]:
            yield (
                f"Updates of {_named([p.name for p in wide])} are too small even for {wide[0].dtype}, up to "
                f"{wide[0].lost_share:.0%} of them: raise the learning rate, or ignore it at the end of a schedule."
            )
        if hit := [p for p in self.parameters if p.flushed_share >= _MUCH]:
            hit.sort(key=lambda p: -p.flushed_share)
            better = better_scale(self.gradients, self.dtype, self.scale)
            yield (
                f"Gradients of {_named([p.name for p in hit])} are flushed to zero, up to {hit[0].flushed_share:.0%} "
                f"of them. {scale_advice(self.gradients, better, self.dtype)}"
            )
        if high := [op for op in self.ops if op.near_overflow >= _MUCH or op.values.overflows]:
            yield (
                f"Results of {_named([op.name for op in high])} are near the largest {high[0].dtype}, up to "
                f"{max(op.values.max_abs for op in high):.3g}: normalize before, or {_keep(high)}."
            )
        if small := [op for op in self.ops if op.near_zero >= _MUCH]:
            small.sort(key=lambda op: -op.near_zero)
            yield (
                f"Results of {_named([op.name for op in small])} are near zero in {small[0].dtype}, up to "
                f"{small[0].near_zero:.0%} of them: scale them up in the model, or {_keep(small)}."
            )

    # ------------------------------------------------------------------------------------------------ text

    def title(self) -> str:
        """Return in one line what was measured."""
        over = f"{self.samples} samples, every {self.every} updates" if self.every else "the last update"
        return f"Health, {dtype_name(self.dtype)}, scale {self.scale:g}, {over}"

    def __str__(self) -> str:
        lines = [self.title()]
        parameters = sorted(self.parameters, key=lambda p: (-p.lost_share, -p.flushed_share))
        rows = [(f"{p.name} ({p.dtype})", _share(p.lost, p.updates), _share(p.flushed, p.gradients))
                for p in parameters if p.lost_share or p.flushed_share]  # fmt: skip
        lines += _table(("parameter", "updates lost", "gradients flushed"), rows)
        ops = sorted(self.ops, key=lambda op: (-op.near_overflow, -op.near_zero))
        shown = [(op.name, _percent(op.near_overflow), _percent(op.near_zero))
                 for op in ops if op.near_overflow or op.near_zero]  # fmt: skip
        lines += _table(("op", "near overflow", "near zero"), shown)
        if len(lines) == 1 and not self.notes:
            lines.append("No update is lost, no gradient is flushed to zero, and no activation is near a limit.")
        return "\n".join([*lines, *self.advice, *self.notes])

    def to_json(self) -> str:
        """Return everything as JSON text."""
        parameters = [{**dataclasses.asdict(p), "lost_share": p.lost_share, "flushed_share": p.flushed_share}
                      for p in self.parameters]  # fmt: skip
        ops = [{**dataclasses.asdict(op), "near_overflow": op.near_overflow, "near_zero": op.near_zero}
               for op in self.ops]  # fmt: skip
        head: dict[str, Any] = {
            "kind": _KIND, "version": _VERSION, "dtype": dtype_name(self.dtype), "scale": self.scale,
            "samples": self.samples, "looks": self.looks, "every": self.every,
        }  # fmt: skip
        rest = {"advice": self.advice, "notes": self.notes, "parameters": parameters, "ops": ops}
        return json.dumps({**head, **rest}, indent=1)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return one self-contained HTML page: parameters and ops, red where much is lost, yellow where something is,
        with a histogram of exponents on a click. It is also written to ``path`` if one is given."""
        text = _page(self)
        if path is not None:
            write_text(path, text, what="The page", error=ArgumentError)
        return text


def _page(health: Health) -> str:
    from ..inspect.render.shaded import cells, shaded_page  # what draws is loaded when it is asked for

    rows = [
        cells(
            _colour(max(p.lost_share, p.flushed_share)), f"{p.name} ({p.dtype})",
            (_share(p.lost, p.updates), _share(p.flushed, p.gradients)),
        )
        for p in health.parameters
    ]  # fmt: skip
    ops = [
        cells(
            _colour(max(op.near_overflow, op.near_zero)), op.name, (_percent(op.near_overflow), _percent(op.near_zero)),
            detail=op.source, ranges={"results": op.values}, dtype=getattr(torch, op.dtype),
        )
        for op in health.ops
    ]  # fmt: skip
    parts = {
        "Parameters": (("parameter", "updates lost", "gradients flushed"), rows),
        "Activations": (("op", "near overflow", "near zero"), ops),
    }
    return shaded_page(health.title(), parts, [*health.advice, *health.notes])


def _colour(share: float) -> str:
    return "overflows" if share >= 10 * _MUCH else "vanishes" if share >= _MUCH else "fits"  # red, yellow, green


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    shown = [head, *((_shortened(name), *figures) for name, *figures in rows[:_SHOWN])]
    lines = [f"{row[0]:<44}" + "".join(f"{cell:>19}" for cell in row[1:]) for row in shown]
    return [*lines, f"and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else lines


def _shortened(name: str) -> str:
    return name if len(name) <= 44 else f"…{name[-43:]}"


def _share(part: int, whole: int) -> str:
    return _percent(part / whole) if whole else "–"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or not share else "<0.1%"


def _named(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:3]) + (f" and {len(unique) - 3} more" if len(unique) > 3 else "")


def _keep(ops: list[OpHealth]) -> str:
    modules = list(dict.fromkeys(op.module for op in ops if op.module))
    names = list(dict.fromkeys(op.op for op in ops if not op.module))
    ways = [f"exclude={modules[:3]}"] * bool(modules) + [f"black_list={names[:3]}"] * bool(names)
    return "keep fp32 there: " + ", ".join(ways) + (", or dtype=torch.bfloat16" if ops[0].dtype == "float16" else "")

