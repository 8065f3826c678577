"""A graph as one self-contained page: no network, everything in the file. The parts are in ``page/``.

In the browser, dagre (``page/dagre.min.js``, MIT) computes the layout. The data holds each distinct node and each
distinct text once: a stage is a list of node numbers.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from ...ir.view import NodeView
from ...rewrite.records import Record
from ..data import ReportData
from .pieces import merge_pieces
from .words import CAST, COLOURS

#: lines and bars need a stronger colour than the background of a box
STRONG = {"bfloat16": "#3fa564", "float16": "#2e93b5", "float32": "#e0952b", "other": "#b6bcc6", "": "#cfd4da"}
#: the texts of a node, in the order of FIELDS in page/layout.js
_FIELDS = ("name", "kind", "op", "value", "precision", "reason", "rule", "cls", "module", "source", "part", "label",
           "origin", "subgraph")  # fmt: skip


def page(stages: Sequence[Record], report: ReportData, *, title: str, graph: str) -> str:
    """Return the page for the stages of one model."""
    texts = {"title": html.escape(f"{title} · amp-compiler"), "data": _script(encode(stages, report, title, graph))}
    files = {"style": "page.css", "dagre": "dagre.min.js", "layout": "layout.js", "page": "page.js",
             "licence": "dagre.LICENSE.txt"}  # fmt: skip
    made = _file("page.html")
    for name, file in files.items():
        made = made.replace("{{" + name + "}}", _file(file))
    for name, text in texts.items():  # last, because a user's text may look like a placeholder
        made = made.replace("{{" + name + "}}", text, 1)
    return made


def report_page(report: ReportData) -> str:
    """Return the page of a report, with the graphs that it was made from."""
    stages = merge_pieces([s for s in report.stages if s.graph != "weights"])
    kinds = {s.graph for s in stages}
    if {"inference", "joint"} <= kinds:  # called both with and without gradients: show the training one
        stages = [s for s in stages if s.graph != "inference"]
    graph = next((kind for kind in ("joint", "inference") if kind in kinds), "forward")
    if not stages:
        stages = [Record("nothing captured", 0.0, False, "")]
    return page(stages, report, title="report", graph=graph)


def _file(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _script(data: Any) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")


def encode(stages: Sequence[Record], report: ReportData, title: str, graph: str) -> dict[str, Any]:
    """Return the contents of the page as plain values."""
    strings: dict[str, int] = {}
    nodes: dict[NodeView, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    listed = [
        {"name": s.name, "graph": s.graph, "seconds": round(s.seconds, 4), "modified": s.modified, "note": s.note,
         "nodes": [nodes.setdefault(_without_code(n), len(nodes)) for n in s.view.nodes]}
        for s in stages
    ]  # fmt: skip
    packed = [
        [[text(str(getattr(n, field))) for field in _FIELDS], [text(i) for i in n.inputs], n.flops, n.nbytes]
        for n in nodes
    ]
    classes = {path: cls for s in stages for path, cls in s.view.classes.items()}
    return {
        "title": title, "graph": graph, "level": report.level, "dtype": report.dtype,
        "low_flops_share": report.low_flops_share,
        "notes": [*(f"not captured: {what}" for what in report.not_captured), *report.notes],
        "colours": {name: [paper, ink, STRONG[name]] for name, (_, paper, ink) in COLOURS.items()},
        "cast": list(CAST[1:]), "classes": classes, "stages": listed, "nodes": packed, "strings": list(strings),
    }  # fmt: skip


def _without_code(node: NodeView) -> NodeView:
    """Return the node without its code, which the page does not show, so that otherwise equal nodes are stored once."""
    return replace(node, code="")
