"""Convert an operand of a call while the twin (``twin.py``) is traced, without a cast in its graph."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)


def converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` in another dtype; to the tracer it is still the same value."""
    mode = get_proxy_mode()
    if mode is None:
        return value.to(dtype)
    proxy = get_proxy_slot(value, mode.tracer, None)
    with disable_proxy_modes_tracing():
        new = value.to(dtype)
    if proxy is not None:
        set_proxy_slot(new, mode.tracer, proxy)
    return new
