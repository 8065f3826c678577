"""A graph as Python that a person can read and, if the graph has no constants or bodies, run."""

from __future__ import annotations

import re

from ...ir.view import BACKWARD, INPUTS, GraphView, NodeView

_WIDTH = 88  # where the reason begins, if the line is shorter


def source(view: GraphView, name: str = "forward") -> str:
    """Return the graph as one function per body, the model's own last: ``def forward(x, weight): …``."""
    bodies = list(dict.fromkeys(n.subgraph for n in view.nodes))
    texts = [_function(view, body, name) for body in sorted(bodies, key=lambda b: (-b.count("."), not b, b))]
    return "import torch\n\n\n" + "\n\n\n".join(sorted(texts, key=lambda t: t.startswith(f"def {name}("))) + "\n"


def _function(view: GraphView, body: str, name: str) -> str:
    nodes = [n for n in view.nodes if n.subgraph == body]
    places = [n for n in nodes if n.kind in INPUTS and n.op == "placeholder"]
    used = {_local(i, body) for n in nodes for i in n.inputs}
    head = f"def {_identifier(body) if body else name}("
    lines = [head]
    for place in places:
        note = f"  # {place.label}" if place.label and place.label != _local(place.name, body) else ""
        lines.append(f'    {_local(place.name, body)}: "{place.value}",{note}')
    lines.append("):")
    module = part = None
    written = False
    for node in nodes:
        if node in places:
            continue
        if node.part != part and node.kind != "output" and any(n.part == BACKWARD for n in nodes):
            part = node.part
            lines += ["", f"    # ---- {part}"]
        if node.module != module and node.kind != "output" and node.op != "get_attr":
            module = node.module
            cls = view.classes.get(module, "")
            lines += ["", f"    # {module or 'the model itself'}{f' ({cls})' if cls else ''}"]
        lines.append(_statement(node, _local(node.name, body) in used, body))
        written = True
    if not written:
        lines.append("    pass")
    return "\n".join(lines)


def _statement(node: NodeView, used: bool, body: str) -> str:
    if node.kind == "output":
        return f"    return {node.code}"
    left = f'    {_local(node.name, body)}: "{node.value}"' if node.value else f"    {_local(node.name, body)}"
    line = f"{left} = {node.code}"
    if node.reason and node.kind != "select":
        line = f"{line:<{_WIDTH}}  # {node.precision}: {node.reason}" if node.precision else f"{line}  # {node.reason}"
    return line


def _local(name: str, body: str) -> str:
    return name.removeprefix(f"{body}.") if body else name


def _identifier(body: str) -> str:
    return re.sub(r"\W", "_", body)
