"""Reports and graphs as JSON, as described by ``schema.json`` next to this file; tests check that the two agree.

``schema`` is the version: removing a field or changing its meaning increases it, adding a field does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from ...ir.view import GraphView, NodeView
from ...rewrite.records import Record
from ..data import ReportData

SCHEMA_VERSION = 1


def schema() -> dict[str, Any]:
    """Return the JSON Schema of everything that this module writes."""
    text = resources.files(__package__).joinpath("schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def report_document(report: ReportData) -> dict[str, Any]:
    """Return a report as plain values."""
    return {
        "schema": SCHEMA_VERSION,
        "level": report.level,
        "dtype": report.dtype,
        "casts": report.casts,
        "cast_bytes": report.cast_bytes,
        "casts_by_module": None if report.casts_by_module is None else dict(report.casts_by_module),
        "low_flops_share": report.low_flops_share,
        "by_precision": dict(report.by_precision),
        "not_captured": list(report.not_captured),
        "notes": list(report.notes),
        "work": None if report.work is None else dict(report.work),
        "kernels": [asdict(kernel) for kernel in report.kernels],
        "scratch_bytes": report.scratch_bytes,
        "rows": [asdict(row) for row in report.rows],
    }


def report_text(report: ReportData) -> str:
    """Return a report as JSON text."""
    return json.dumps(report_document(report), indent=1)


def graph_document(
    report: ReportData, view: GraphView, stages: Sequence[Record], *, target: str, graph: str
) -> dict[str, Any]:
    """Return a report with the nodes of one graph and the stages that led to it, as plain values."""
    return {
        **report_document(report),
        "target": target,
        "graph": graph,
        "after": stages[-1].name,
        "passes": [
            {"name": s.name, "graph": s.graph, "seconds": round(s.seconds, 6), "modified": s.modified,
             "nodes": s.nodes, "casts": s.casts, "note": s.note}
            for s in stages
        ],
        "modules": dict(view.classes),
        "nodes": [node_document(node) for node in view.nodes],
    }  # fmt: skip


def node_document(node: NodeView) -> dict[str, Any]:
    """Return a node as plain values."""
    found = asdict(node)
    found["values"] = [{"dtype": v.dtype, "shape": list(v.shape)} for v in node.values]
    found["inputs"], found["causes"] = list(node.inputs), list(node.causes)
    found["bytes"] = found.pop("nbytes")
    found["class"] = found.pop("cls")
    found["text"] = found.pop("code")
    del found["number"]
    return found
