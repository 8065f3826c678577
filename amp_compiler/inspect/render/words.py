"""Words and colours that all pictures share."""

from __future__ import annotations

from ...ir.view import OTHER, NodeView

#: precision -> (terminal style, fill, ink): the legend of every picture
COLOURS = {
    "bfloat16": ("green", "#d6f0dc", "#14532d"),
    "float16": ("cyan", "#d3ecf4", "#0c4a5e"),
    "float32": ("yellow", "#fde9c8", "#7a4300"),
    OTHER: ("dim", "#eceef1", "#4b5563"),
    "": ("", "#ffffff", "#4b5563"),
}
CAST = ("magenta", "#f3d9f5", "#701a75")


def size(nbytes: float) -> str:
    """Return a number of bytes as people write it.

    >>> size(512), size(2048), size(3_400_000)
    ('512 B', '2.0 kB', '3.4 MB')
    """
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= step:
            return f"{nbytes / step:,.1f} {unit}"
    return f"{nbytes:,.0f} B"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 cast``, ``2 casts``.

    >>> count(1, "cast"), count(2, "cast"), count(2, "bus", "buses")
    ('1 cast', '2 casts', '2 buses')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def is_row(node: NodeView) -> bool:
    """True if a list of ops shows this node: parameters and selections of outputs are omitted."""
    return node.kind in ("input", "call", "cast", "output")
