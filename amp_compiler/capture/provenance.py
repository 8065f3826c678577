"""What torch's tracers leave on a node about where it came from, after differentiation.

torch 2.13: ``meta["from_node"]`` names the node that an interpreter ran, ``meta["seq_nr"]`` is autograd's number of an
op, which its backward ops share, and ``autograd_backward`` or ``partitioner_tag`` mark the nodes of a backward.
"""

from __future__ import annotations

from torch import fx


def traced_from(node: fx.Node) -> str:
    """The name of the node that was running when this one was traced, or ''."""
    found = node.meta.get("from_node")
    return str(found[-1].name) if found else ""


def sequence_number(node: fx.Node) -> int | None:
    """Autograd's number of the op; shared by an op and its backward."""
    found = node.meta.get("seq_nr")
    return found if isinstance(found, int) and found >= 0 else None


def in_backward(node: fx.Node) -> bool:
    """Whether the node was traced while autograd ran a backward."""
    return bool(node.meta.get("autograd_backward")) or node.meta.get("partitioner_tag") == "is_backward"
