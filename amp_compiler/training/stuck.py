"""Warn when many updates in a row are skipped, so that training makes no progress, and say why.

The scaler counts skipped updates on the device. The count is read where that costs nothing: on a CPU, after the host
has read the skip flag for an optimizer that isn't fused, and when a checkpoint is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ..common.errors import AmpWarning
from ..common.messages import first_line, users_frame
from .overflow import Overflow
from .scaler_base import LossScaler


def warn_if_stuck(scaler: LossScaler, explain: Callable[[], Overflow], *, waited: bool) -> None:
    """Warn once per long series of skipped updates. ``explain`` looks at the last of them; ``waited``: the host has
    just waited for the device."""
    count = scaler.newly_stuck(waited=waited)
    if not count:
        return
    try:
        lines = str(explain()).splitlines()
    except Exception as error:  # no memory for a second run, or code that cannot run twice
        lines = [f"The op that overflowed could not be determined ({first_line(error, named=True)})."]
    warnings.warn(
        f"The last {count} updates were skipped because a gradient was not finite each time: training has stalled. "
        f"The loss scale is {scaler.get_scale():g}. {' '.join(dict.fromkeys((lines[0], lines[-1])))} "
        "Call step.explain_overflow() after a skipped step for details.",
        AmpWarning,
        stacklevel=users_frame(),
    )
