"""Checks of the numbers that a loss scaler is made of, as arguments and in a state dict."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..common.errors import ArgumentError

SMALLEST = torch.finfo(torch.float32).tiny  # the smallest normal number; 1 / scale is inf not far below it
LARGEST = torch.finfo(torch.float32).max


def finite(value: Any, name: str, what: str) -> float:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int too large for a float
            number = float(value)
    if not math.isfinite(number):
        raise ArgumentError(f"{name} must be {what}, not {value!r}.")
    return number


def scale_of(value: Any, name: str) -> float:
    """Return the scale rounded to fp32."""
    what = f"a finite number above 0 that fp32 can hold ({SMALLEST:.1e} to {LARGEST:.1e})"
    number = finite(value, name, what)
    if not SMALLEST <= number <= LARGEST:
        raise ArgumentError(f"{name} must be {what}, not {value!r}.")
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def growth(value: Any, name: str) -> float:
    if (factor := finite(value, name, "a finite number above 1")) <= 1:
        raise ArgumentError(f"{name} must be above 1, not {value!r}.")
    return factor


def backoff(value: Any, name: str) -> float:
    if not 0 < (factor := finite(value, name, "a number between 0 and 1")) < 1:
        raise ArgumentError(f"{name} must be between 0 and 1, both excluded, not {value!r}.")
    return factor


def positive_int(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ArgumentError(f"{name} must be an int of at least 1 (and below 2**31), not {value!r}.")
    return value


def cap(value: Any, name: str) -> float | None:
    return None if value is None else scale_of(value, name)


def device(value: Any, name: str) -> torch.device | None:
    if value is None:
        return None
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{name} must be a device such as 'cuda' or 'cpu', or None, not {value!r}.") from error


def count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ArgumentError(f"{name} must be a count, not {value!r}.")
    return value


_MISSING: Any = object()


class State:
    """A state dict from outside, whose entries are checked as they are read."""

    def __init__(self, state: Any) -> None:
        if not isinstance(state, Mapping):
            raise ArgumentError(f"load_state_dict() takes the dict from state_dict(), not {type(state).__name__}.")
        if not state:
            raise ArgumentError(
                "load_state_dict() got an empty dict, which is what a disabled torch.amp.GradScaler saves. Omit the "
                "call to start with a fresh scale."
            )
        self._state = state

    def take(self, key: str, check: Callable[[Any, str], Any], default: Any = _MISSING) -> Any:
        value = self._state.get(key, default)
        if value is _MISSING:
            raise self.wrong(f"the key {key!r} is missing.")
        try:
            return check(value, key)
        except ArgumentError as error:
            raise self.wrong(str(error)) from None

    @staticmethod
    def wrong(what: str) -> ArgumentError:
        return ArgumentError(
            f"load_state_dict(): not the state of a loss scaler: {what} Nothing was loaded. Pass the state_dict() of a "
            "loss scaler or of torch.amp.GradScaler, or omit the call to start with a fresh scale."
        )
