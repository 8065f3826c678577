"""Words and colours that all pictures share."""

from __future__ import annotations

from ...common.messages import count as count
from ...common.messages import size as size
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


def is_row(node: NodeView) -> bool:
    """True if a list of ops shows this node: parameters and selections of outputs are omitted."""
    return node.kind in ("input", "call", "cast", "output")
