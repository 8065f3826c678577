"""A graph as text, one line per node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..common.torch_names import pytree
from .casts import cast_dtype, cast_source, is_cast
from .graphs import all_graphs
from .meta import decision
from .schema import is_getitem, overload_name
from .values import DTYPE_NAMES


def format_value(value: Any) -> str:
    """Return ``bf16[8, 64]`` for a tensor, a tuple of such texts for several, '' for anything else."""
    if isinstance(value, torch.Tensor):
        name = DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{name}[{', '.join(str(s) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(format_value(v) or "_" for v in value) + ")"
    return ""


def format_argument(value: Any) -> str:
    """Return an argument as a person would write it."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(format_argument(v) for v in value) + "]"
    return str(value)


def format_node(node: fx.Node) -> str:
    """Return one line of readable text for one node."""
    args = [format_argument(a) for a in node.args]
    args += [f"{k}={format_argument(v)}" for k, v in node.kwargs.items() if v is not None]
    if node.op == "output":
        values = pytree.tree_leaves(node.args[0])
        return "return " + ", ".join(format_argument(v) for v in values)
    shape = format_value(node.meta.get("val"))
    left = f"{node.name}: {shape}" if shape else node.name
    if node.op == "placeholder":
        return f"input {left}"
    if node.op == "get_attr":
        return f"{left} = self.{node.target}"
    if is_cast(node):
        return (
            f"{left} = cast({cast_source(node).name}, {DTYPE_NAMES.get(cast_dtype(node), cast_dtype(node))})"
        )
    return f"{left} = {overload_name(node)}({', '.join(args)})"


def format_graph(gm: fx.GraphModule, *, reasons: bool = False) -> str:
    """Return the whole graph as text, one line per node, subgraphs indented below it."""
    lines = []
    for node in gm.graph.nodes:
        line = format_node(node)
        known = decision(node)
        if reasons and known is not None and node.op == "call_function" and not is_getitem(node):
            line = f"{line:<90}  # {known.reason}"
        lines.append(line)
    for name, inner in all_graphs(gm):
        if name:
            lines.append(f"graph {name}:")
            lines += ["    " + format_node(n) for n in inner.graph.nodes]
    return "\n".join(lines)
