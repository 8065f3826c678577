"""The command line: ``amp-compiler dump | explain | convert | ops | passes | doctor``. One file per command."""

from __future__ import annotations


def main() -> None:
    """Run the ``amp-compiler`` script."""
    from .app import app

    app(prog_name="amp-compiler")
