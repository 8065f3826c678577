"""Where a node comes from: the user's module, the user's line, the node that it was traced from."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from .graphs import all_graphs
from .meta import CALL, NESTED, REGION
from .schema import op_name


def module_stack(node: fx.Node) -> list[tuple[str, Any]]:
    """Return (module path, class) from the outermost module to the innermost, with paths as in ``named_modules``."""
    found = node.meta.get("amp_module_stack")
    return found if found is not None else []


def module_chain(node: fx.Node) -> list[str]:
    """Return the paths of all modules around a node, outermost first, including those that are never called (a
    ModuleList) or that a graph break hid from the tracer."""
    found = [""]
    for path, _ in module_stack(node):
        parts = path.split(".") if path else []
        for end in range(1, len(parts) + 1):
            if (prefix := ".".join(parts[:end])) not in found:
                found.append(prefix)
    return found


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that a node comes from ('' for the model itself)."""
    stack = module_stack(node)
    return stack[-1][0] if stack else ""


class Calls:
    """Numbers the ops of all graphs of a model: those of a further piece of the code, after a graph break, go on where
    the pieces before it ended, and a piece that is captured anew has the numbers that it had."""

    def __init__(self) -> None:
        self._ends: Counter[tuple[str, str]] = Counter()
        self._starts: dict[tuple[Hashable, str, str], int] = {}

    def number(self, gm: fx.GraphModule, piece: Hashable) -> None:
        """Number the ops of a graph. ``piece``: what identifies the piece of code that it was captured from."""
        keys = Counter((module_path(n), op_name(n)) for _, g in all_graphs(gm) for n in g.graph.nodes if _is_call(n))
        starts = {key: self._starts.setdefault((piece, *key), self._ends[key]) for key in keys}
        number_calls(gm, starts)
        for key, count in keys.items():
            self._ends[key] = max(self._ends[key], starts[key] + count)


def number_calls(gm: fx.GraphModule, starts: Mapping[tuple[str, str], int] | None = None) -> None:
    """Write on each op which of its module's calls of that op it is (``node.meta["amp_call"]``), in graph order. A
    graph that is numbered keeps its numbers, so that they stay those of the captured graph when a pass removes an
    op. ``starts``: (module path, op) -> the number of the first call, if it is not 0."""
    if any(CALL in node.meta for node in gm.graph.nodes):
        return
    counts: Counter[tuple[str, str]] = Counter(starts)
    for _, inner in all_graphs(gm):
        for node in inner.graph.nodes:
            if _is_call(node):
                key = module_path(node), op_name(node)
                node.meta[CALL] = counts[key]
                counts[key] += 1


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function"


#: code that is not the user's: torch, and what calls the model for us
_NOT_THEIRS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>\S+)\n\s*(?P<code>[^\n]*)')


def source_line(node: fx.Node) -> str:
    """Return ``file.py:12 in forward: self.fc(x)`` for the innermost user frame, or ''."""
    return _innermost(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)  # needed at each stage of a graph; the ops of a line share their trace
def _innermost(trace: str) -> str:
    frames = _FRAME.findall(trace)
    if not frames:
        return ""
    own = [frame for frame in frames if not frame[0].startswith(_NOT_THEIRS)]
    file, line, where, code = (own or frames)[-1]
    return f"{file}:{line} in {where}: {code.strip()}"


def inherit_origin(node: fx.Node, origin: fx.Node) -> None:
    """Give a new node the source line and module of the node that it was made for."""
    for key in ("stack_trace", "nn_module_stack", "amp_module_stack", "seq_nr", "from_node", "custom", REGION, NESTED):
        if key in origin.meta:
            node.meta[key] = origin.meta[key]


def inherit_placement(node: fx.Node, of: fx.Node) -> None:
    """Make torch's partitioner treat a node like ``of``: in the forward or the backward, kept or recomputed."""
    for key in ("partitioner_tag", "recompute", "ac_graph_id"):
        if key in of.meta:
            node.meta[key] = of.meta[key]
        else:
            node.meta.pop(key, None)


# torch's tracers annotate a node (torch 2.13) with ``meta["from_node"]``, which names the node that an interpreter ran;
# ``meta["seq_nr"]``, autograd's number of an op, which its backward ops share; and ``autograd_backward`` or
# ``partitioner_tag``, which mark the nodes of a backward.


def traced_from(node: fx.Node) -> str:
    """Return the name of the node that was running when this one was traced, or ''."""
    found = node.meta.get("from_node")
    return str(found[-1].name) if found else ""


def sequence_number(node: fx.Node) -> int | None:
    """Return autograd's number of the op, shared by an op and its backward."""
    found = node.meta.get("seq_nr")
    return found if isinstance(found, int) and found >= 0 else None


def in_backward(node: fx.Node) -> bool:
    """True if the node was traced while autograd ran a backward."""
    return bool(node.meta.get("autograd_backward")) or node.meta.get("partitioner_tag") == "is_backward"
