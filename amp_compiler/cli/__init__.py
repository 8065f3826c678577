"""The command line: ``amp-compiler dump | explain | convert | passes | doctor``. One file a command."""

from __future__ import annotations


def main() -> None:
    """What the ``amp-compiler`` script runs."""
    from .app import app

    app(prog_name="amp-compiler")
