"""Regions in which plain Python runs: either only its products run under autocast, one by one, or all of the code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..capture import frames
from ..common.torch_names import pop_function_mode, push_function_mode, pytree
from ..ir import LOW_DTYPES
from .products import PlainProducts

#: autocast doesn't support RNNs on every device: one that cannot be compiled stays in fp32
_NOT_ALONE = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class _Here(threading.local):
    """The region that this thread is in."""

    region: LowProducts | Autocast | None = None


HERE = _Here()
NOTHING = nullcontext()
frames.belongs_to_us(__file__)


class LowProducts(TorchFunctionMode):
    """Runs products under autocast one by one, and converts their results back to fp32."""

    def __init__(self, products: PlainProducts) -> None:
        super().__init__()
        self.products = products

    def enter(self, above: int = 0) -> None:
        """Take effect below the ``above`` topmost modes, which the user's code has opened."""
        others = [pop_function_mode() for _ in range(above)]
        push_function_mode(self)
        for mode in reversed(others):
            push_function_mode(mode)

    def leave(self) -> int:
        """End the region; return how many modes of the user's code were above it."""
        others = []
        while (mode := pop_function_mode()) is not self:
            others.append(mode)
        for mode in reversed(others):
            push_function_mode(mode)
        return len(others)

    @frames.unwatched
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        low = self.products.low_for(func)
        if low is None:
            result = func(*args, **kwargs)
            self.products.note_wide(func, (args, kwargs), result)
            if self.products.is_in_place_product(func, result):
                self.products.stays_wide(func, "it writes in place")
            return result
        floats = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        if not floats or any(t.dtype is not torch.float32 for t in floats):
            return func(*args, **kwargs)
        if "out" not in kwargs and func.__name__ not in _NOT_ALONE and not frames.watches_saved_tensors():
            try:
                with torch.autocast(floats[0].device.type, dtype=low):
                    result = func(*args, **kwargs)
            except (RuntimeError, ValueError):  # no kernel in this dtype; a wrong call fails again below
                pass
            else:
                if any(isinstance(t, Tensor) and t.dtype in LOW_DTYPES for t in pytree.tree_leaves(result)):
                    return pytree.tree_map_only(Tensor, _as_fp32, result)
                self.products.stays_wide(func)
                return result
        result = func(*args, **kwargs)
        again = "torch.utils.checkpoint computes it again in the backward, outside of this call"
        self.products.stays_wide(func, again if frames.watches_saved_tensors() else "")
        return result


def _as_fp32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in LOW_DTYPES else value


class Autocast:
    """Runs all of the code under ``torch.autocast``. It doesn't use torch's context manager, which would look like a
    region that the model's code has opened."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.before: tuple[bool, torch.dtype] = (False, dtype)

    def enter(self, above: int = 0) -> None:
        self.before = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)
        torch.set_autocast_enabled(self.device, True)
        torch.set_autocast_dtype(self.device, self.dtype)

    def leave(self) -> int:
        enabled, dtype = self.before
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        return 0


@contextmanager
def inside(region: LowProducts | Autocast | None) -> Iterator[None]:
    """Change the region that this thread is in, and restore it on exit."""
    before = HERE.region
    if before is region:
        yield
        return
    above = before.leave() if before is not None else 0
    if region is not None:
        region.enter()
    HERE.region = region
    try:
        yield
    finally:
        if region is not None:
            region.leave()
        if before is not None:
            before.enter(above)
        HERE.region = before


def suspended() -> AbstractContextManager[None]:
    """Leave the region for a call of a compiled model, which may come from the uncaptured code of another model."""
    return NOTHING if HERE.region is None else inside(None)
