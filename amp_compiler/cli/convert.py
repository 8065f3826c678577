"""``amp-compiler convert``."""

from __future__ import annotations

from . import common as c

NAME = "convert"
HELP = "Convert."
EPILOG = ""


def run(target: c.Target) -> None:
    raise NotImplementedError
