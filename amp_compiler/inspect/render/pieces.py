"""Merge several captured graphs of one model, which graph breaks and re-compilations cause, into one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...ir.view import GraphView
from ...rewrite.records import Record


def merge_pieces(stages: Sequence[Record]) -> list[Record]:
    """Return the stages of several captured graphs as those of one: a stage holds all graphs as they are after it."""
    pieces: list[dict[tuple[str, str], Record]] = []
    for stage in stages:
        if stage.name == "capture" or not pieces:
            pieces.append({})
        pieces[-1][(stage.name, stage.graph)] = stage
    if len(pieces) <= 1:
        return list(stages)
    order = list(dict.fromkeys(key for piece in pieces for key in piece))
    merged = []
    for key in order:
        there = [(i, piece[key]) for i, piece in enumerate(pieces) if key in piece]
        first = there[0][1]
        merged.append(
            dataclasses.replace(
                first,
                seconds=sum(s.seconds for _, s in there),
                modified=any(s.modified for _, s in there),
                nodes=sum(s.nodes for _, s in there),
                casts=sum(s.casts for _, s in there),
                text="\n".join(f"graph {i}:\n{s.text}" for i, s in there),
                view=_joined([(f"g{i}", s.view) for i, s in there]),
            )
        )
    return merged


def _joined(views: Sequence[tuple[str, GraphView]]) -> GraphView:
    nodes = [
        dataclasses.replace(
            node, name=f"{prefix}.{node.name}", inputs=tuple(f"{prefix}.{i}" for i in node.inputs),
            subgraph=f"{prefix}.{node.subgraph}" if node.subgraph else prefix,
            origin=f"{prefix}.{node.origin}" if node.origin else "",
        )
        for prefix, view in views for node in view.nodes
    ]  # fmt: skip
    return GraphView(tuple(nodes), {k: v for _, view in views for k, v in view.classes.items()})
