"""Update after update is skipped: training stands still, and somebody has to say so, with the cause.

The scaler counts skipped updates on the device. The count is read where that costs nothing: on a CPU, where the host
has just read the skip flag for an optimizer that is not fused, and where a checkpoint is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ..common.errors import AmpWarning
from ..common.messages import first_line, users_frame
from .overflow import Overflow
from .scaler_base import LossScaler


def warn_if_stuck(scaler: LossScaler, explain: Callable[[], Overflow], *, waited: bool) -> None:
    """Warn, once for each time that many updates in a row are skipped. ``explain`` looks at the last of them;
    ``waited``: the host has just waited for the device."""
    count = scaler.newly_stuck(waited=waited)
    if not count:
        return
    try:
        lines = str(explain()).splitlines()
    except Exception as error:  # no memory for a second run, or code that cannot run twice
        lines = [f"What overflowed could not be found out ({first_line(error, named=True)})."]
    warnings.warn(
        f"The last {count} updates were skipped, because a gradient was not finite each time: the weights stand still. "
        f"The loss scale is {scaler.get_scale():g}. {' '.join(dict.fromkeys((lines[0], lines[-1])))} "
        "step.explain_overflow() after a skipped step tells more.",
        AmpWarning,
        stacklevel=users_frame(),
    )
