"""A graph in Graphviz's language, with one cluster per module, and as SVG if Graphviz is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...common.errors import DrawingError
from ...ir.view import BACKWARD, GraphView, NodeView
from .words import CAST, COLOURS, size

_SECONDS = 300.0  # Graphviz is slow on graphs of thousands of nodes


def dot(view: GraphView, title: str = "") -> str:
    """Return the graph as DOT text. Parameters, buffers and constants are not drawn."""
    hidden = {n.name for n in view.nodes if n.kind in ("parameter", "buffer", "constant")}
    lines = [
        "digraph amp {",
        f"  label={_quote(title)}; labelloc=t; fontname=Helvetica; rankdir=TB; ranksep=0.3; nodesep=0.2;",
        '  node [shape=box, style="rounded,filled", fontname=Helvetica, fontsize=11, color="#9ca3af"];',
        '  edge [color="#9ca3af", arrowsize=0.6];',
    ]
    root = _Box("")
    for node in view.nodes:
        if node.name not in hidden:
            parts = ["backward"] if node.part == BACKWARD and node.kind != "output" else []
            if node.module and node.kind in ("call", "cast", "select"):
                parts += node.module.split(".")
            box = root
            for part in parts:
                box = box.below.setdefault(part, _Box(f"{box.path}.{part}" if box.path else part))
            box.nodes.append(node)
    lines += _cluster(root, view, "  ")
    for node in view.nodes:
        if node.name in hidden:
            continue
        for name in dict.fromkeys(node.inputs):
            if name in view.by_name and name not in hidden:
                lines.append(f"  {_quote(name)} -> {_quote(node.name)};")
    return "\n".join([*lines, "}"]) + "\n"


@dataclass
class _Box:
    """A module: its nodes and the modules in it."""

    path: str
    nodes: list[NodeView] = field(default_factory=list)
    below: dict[str, _Box] = field(default_factory=dict)


def _cluster(box: _Box, view: GraphView, indent: str) -> Iterator[str]:
    for node in box.nodes:
        yield indent + _node(node, view)
    for child in box.below.values():
        cls = view.classes.get(child.path.removeprefix("backward."), "")
        label = f"{child.path}\n{cls}" if cls else child.path
        yield f"{indent}subgraph {_quote('cluster_' + child.path)} {{"
        yield f'{indent}  label={_quote(label)}; style="rounded"; color="#d1d5db"; fontsize=10;'
        yield from _cluster(child, view, indent + "  ")
        yield indent + "}"


def _node(node: NodeView, view: GraphView) -> str:
    if node.kind == "cast":
        source = view.by_name.get(node.inputs[0]) if node.inputs else None
        what = f"{source.title}\n" if source is not None and source.kind in ("parameter", "buffer") else ""
        label = f"{what}→ {node.value}\n{size(node.nbytes)}"
        fill, ink, shape = CAST[1], CAST[2], ", shape=cds"
    else:
        named = node.title if node.kind in ("input", "output") else f"{node.op}\n{node.name}"
        label = f"{named}\n{node.value}" if node.value else named
        _, fill, ink = COLOURS.get(node.precision, COLOURS[""])
        shape = ", shape=ellipse" if node.kind in ("input", "output") else ""
    tip = f', tooltip={_quote(node.reason)}' if node.reason else ""
    return f'{_quote(node.name)} [label={_quote(label)}, fillcolor="{fill}", fontcolor="{ink}"{shape}{tip}];'


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def svg(view: GraphView, title: str = "") -> str:
    """Return the graph as SVG, laid out by Graphviz."""
    program = shutil.which("dot")
    if program is None:
        raise DrawingError(
            "An SVG needs Graphviz, but there is no 'dot' on PATH: install it (Debian: graphviz, macOS: brew install "
            "graphviz), or use --format html, which needs nothing."
        )
    try:
        done = subprocess.run(
            [program, "-Tsvg"], input=dot(view, title), capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        raise DrawingError(
            f"Graphviz needs more than {_SECONDS:.0f} s for {len(view.nodes)} nodes: look at a part of the graph with "
            "--module, or use --format html."
        ) from None
    except subprocess.CalledProcessError as error:
        first = (error.stderr or "").strip().splitlines()[:1]
        raise DrawingError(f"Graphviz failed: {first[0] if first else error}.") from error
    return done.stdout
