"""One line on stderr for implicit work that takes long; ``AMP_LOGS=quiet`` suppresses it."""

from __future__ import annotations

import contextlib
import os
import sys

SETTING = "AMP_LOGS"
QUIET = "quiet"


def is_quiet() -> bool:
    """True if ``AMP_LOGS`` contains ``quiet``, which allows no lines but those of its topics (``quiet,passes``)."""
    return QUIET in (name.strip().lower() for name in os.environ.get(SETTING, "").split(","))


def tell(text: str) -> None:
    """Print a line at once, unless ``AMP_LOGS`` says quiet. A closed stderr is ignored."""
    if not is_quiet():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"amp_compiler: {text}", file=sys.stderr, flush=True)
