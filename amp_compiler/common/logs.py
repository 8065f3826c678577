"""``AMP_LOGS=passes,casts,capture`` logs what the compiler does to stderr. The loggers are ``amp_compiler.passes`` … of
``logging``, so an application can also attach its own handlers.

``AMP_LOGS=quiet``, alone or among topics, suppresses the lines that are printed by default: those before and after the
CPU kernels are compiled (``notice.py``). Warnings are not affected; use ``warnings.filterwarnings`` for them.
"""

from __future__ import annotations

import functools
import logging
import os
import sys

from .notice import QUIET, SETTING

TOPICS = {
    "passes": "each pass: seconds, nodes, whether it changed anything",
    "casts": "each cast that was added or removed",
    "capture": "what was captured, by which front end, and what was not",
}
ALL = "all"


def check() -> None:
    """Raise ``ValueError`` if ``AMP_LOGS`` names something unknown."""
    _asked(os.environ.get(SETTING, ""))


def wants(topic: str) -> bool:
    """True if a topic is logged; check it before building a long text."""
    return _logger(topic, os.environ.get(SETTING, "")).isEnabledFor(logging.INFO)


def log(topic: str, message: str, *args: object) -> None:
    """Log a message on a topic."""
    _logger(topic, os.environ.get(SETTING, "")).info(message, *args)


@functools.cache
def _logger(topic: str, setting: str) -> logging.Logger:
    found = logging.getLogger(f"amp_compiler.{topic}")
    if topic in _asked(setting) and not found.handlers:
        handler = logging.StreamHandler(sys.__stderr__ or sys.stderr)  # not a replacement that is installed just now
        handler.setFormatter(logging.Formatter(f"[amp {topic}] %(message)s"))
        found.addHandler(handler)
        found.setLevel(logging.INFO)
        found.propagate = False
    return found


@functools.cache
def _asked(setting: str) -> frozenset[str]:
    names = frozenset(name for part in setting.split(",") if (name := part.strip().lower()))
    for name in sorted(names - {*TOPICS, ALL, QUIET}):
        raise ValueError(f"{SETTING}={setting!r}: {name!r} is not one of: {', '.join((*TOPICS, ALL, QUIET))}.")
    return frozenset(TOPICS) if ALL in names else names
