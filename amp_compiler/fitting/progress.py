"""What a run shows while it runs: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SECONDS = 0.25  # between two looks at the loss, each of which waits for the device


class Bar:
    """A progress bar on a terminal; without one, or if it is not wanted, every method does nothing.

    The loss is read from the device only when it is shown, a few times per second.
    """

    def __init__(self, wanted: bool, epochs: int) -> None:
        self.epochs, self.shown = epochs, 0.0
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            console = Console(stderr=True)
            if console.is_terminal:
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                self._progress = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, number: int, length: int | None, done: int) -> None:
        """Begin an epoch, counted from 1."""
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(self._text(number), total=length, completed=done)

    def advance(self, number: int, loss: Tensor) -> None:
        """One more batch was run."""
        if self._progress is not None and self._task is not None:
            now = time.monotonic()
            if now - self.shown >= _SECONDS:
                self._progress.update(self._task, description=self._text(number, float(loss)))
                self.shown = now
            self._progress.advance(self._task)

    def _text(self, number: int, loss: float | None = None) -> str:
        return f"epoch {number}/{self.epochs}" + ("" if loss is None else f"  loss {loss:.4g}")
