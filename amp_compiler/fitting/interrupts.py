"""Ctrl-C while a run is at work: the update in progress is finished first."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from ..common.notice import tell


class Interrupts:
    """Remembers the first Ctrl-C instead of raising ``KeyboardInterrupt`` in the middle of an update; a second one is
    raised at once. A handler of the user's own, and threads, are left alone: there it is raised as always."""

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        ours = threading.current_thread() is threading.main_thread()
        if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def asked(self) -> bool:
        """True if the run is to end."""
        return self._asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            signal.default_int_handler(number, frame)
        self._asked = True
        tell("fit() stops after this update. Press Ctrl-C once more to stop at once.")
