"""What processes that tests start for their cases do less of, as ``conftest.py`` does for the test processes."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from unittest import mock

#: set by ``parallel/harness.py`` for the cases of ``make test``
SAVE_TIME = "AMP_TESTS_SAVE_TIME"


def spend_less() -> None:
    """Look for garbage less often, and do not measure how long guards take. Call it once torch is imported."""
    import torch._dynamo.guards as guards

    guards.profile_guard_manager = lambda *args: 0.0  # Dynamo only logs it, and flushes the processor's caches for it
    gc.set_threshold(200_000, 10, 10)  # a compilation makes millions of objects, and few of them are garbage


def keep_what_is_imported() -> None:
    """Exempt everything that is there so far from garbage collection."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def by_rule(also: bool = True) -> Iterator[None]:
    """Inside, graphs are verified by rule and not deep, unless ``also`` is False. For a model in a single process
    beside the one that a case is about, or for graphs that were verified before: bits are compared there. Only in runs
    that save time (``SAVE_TIME``): the long targets verify everything deep."""
    with mock.patch.dict(os.environ, {"AMP_VERIFY": ""} if also and SAVE_TIME in os.environ else {}):
        yield
