"""Devices by name: those of the table, and those that users describe in a TOML file."""

from __future__ import annotations

import math
import os
import tomllib
from pathlib import Path
from typing import Any

from ..common.errors import ArgumentError
from ..common.messages import suggestion
from .device import KERNEL_MICROSECONDS, row
from .device import Device as Device
from .machine import NAME as THIS_MACHINE
from .machine import this_machine
from .table import DEVICES


def find(name: str | os.PathLike[str] | Device) -> Device:
    """A device by its name, or by the path of a TOML file that describes one. ``"this_machine"`` is the CPU at hand.

    >>> find("t4").title
    'NVIDIA T4'
    """
    if isinstance(name, Device):
        return name
    text = os.fspath(name) if isinstance(name, (str, os.PathLike)) else ""
    if text.endswith(".toml"):
        return read(text)
    key = text.lower().replace("-", "_")
    if key == THIS_MACHINE:
        return this_machine()
    if key in DEVICES:
        return DEVICES[key]
    known = [*DEVICES, THIS_MACHINE]
    near = suggestion(key, known, most=3, cutoff=0.5)
    raise ArgumentError(
        f"Unknown device {name!r}.", hint=f"{near} Known: {', '.join(known)}, or the path of a TOML file.".strip()
    )


# ------------------------------------------------------------------------------------------- files of users

#: key of a device's file -> (smallest, largest value that can be meant, unit)
_NUMBERS = {
    "fp32": (0.01, 1e4, "TFLOP/s"), "tf32": (0.01, 1e5, "TFLOP/s"), "fp16": (0.01, 1e5, "TFLOP/s"),
    "bf16": (0.01, 1e5, "TFLOP/s"), "bandwidth": (1, 1e5, "GB/s"), "sms": (1, 1e5, "multiprocessors"),
    "memory": (0.1, 1e5, "GB"), "link": (0.01, 1e5, "GB/s"), "launch": (0, 1e3, "microseconds"),
    "host": (0, 1e4, "microseconds"),
}  # fmt: skip
_NEEDED = ("fp32", "bandwidth", "sms")
_DEFAULTS = {"tf32": None, "fp16": None, "bf16": None, "memory": 16, "link": 16, "launch": KERNEL_MICROSECONDS,
             "host": None}  # fmt: skip


def read(path: str | os.PathLike[str]) -> Device:
    """The device that a TOML file describes."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"The device file {path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"The device file {path} is not TOML: {error}.") from None
    texts = {"name": Path(path).stem, "title": "", "source": str(path)}
    for key in data:
        if key not in _NUMBERS and key not in texts:
            hint = suggestion(key, [*texts, *_NUMBERS], otherwise=f"Known: {', '.join([*texts, *_NUMBERS])}.")
            raise ArgumentError(f"The device file {path} has an unknown key {key!r}.", hint=hint)
    for key in _NEEDED:
        if key not in data:
            raise ArgumentError(f"The device file {path} lacks {key!r} ({_NUMBERS[key][2]}): see the data sheet.")
    figures = {key: _number(path, key, value) for key, value in data.items() if key in _NUMBERS}
    texts.update({key: str(value) for key, value in data.items() if key in texts})
    texts["title"] = texts["title"] or texts["name"]
    given: dict[str, Any] = {**_DEFAULTS, **texts, **figures}
    given["sms"] = int(given["sms"])
    return row(given.pop("name"), given.pop("title"), **given)


def _number(path: str | os.PathLike[str], key: str, value: Any) -> float:
    low, high, unit = _NUMBERS[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"The device file {path}: {key} is {value!r}, not a number ({unit}).")
    if not math.isfinite(value) or not low <= value <= high:
        raise ArgumentError(
            f"The device file {path}: {key} = {value:g} {unit} cannot be right; expected is {low:g} to {high:g}."
        )
    return float(value)
