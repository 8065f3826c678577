"""One line on stderr for work that takes long and was not asked for; ``AMP_LOGS=quiet`` leaves it out."""

from __future__ import annotations

import contextlib
import os
import sys

SETTING = "AMP_LOGS"
QUIET = "quiet"


def is_quiet() -> bool:
    """True if ``AMP_LOGS`` asks for no lines beside those of its topics: ``quiet``, ``quiet,passes``."""
    return QUIET in (name.strip().lower() for name in os.environ.get(SETTING, "").split(","))


def tell(text: str) -> None:
    """Print a line at once, unless it is to be quiet. A closed stderr is no reason to fail."""
    if not is_quiet():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"amp_compiler: {text}", file=sys.stderr, flush=True)
