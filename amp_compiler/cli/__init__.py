"""The command line: ``amp-compiler dump | explain | convert | ops | passes | doctor``. One file per command."""

from __future__ import annotations


def main() -> None:
    """What the ``amp-compiler`` script runs."""
    from .app import app

    app(prog_name="amp-compiler")
