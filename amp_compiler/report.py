"""``report()``: every op with its precision and why, and what it adds up to."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import graph as g
from .flops import node_flops
from .pipeline import Record
from .policy import dtype_name
from .view import precision_name


@dataclass(frozen=True, slots=True)
class Row:
    """One op of one captured graph."""

    node: str
    op: str
    module: str
    source: str
    precision: str
    reason: str
    rule: str
    graph: int
    flops: int = 0

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.node} ({self.op}{where}): {self.precision}, {self.reason}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """How often an op of ours runs in the place of ATen's, and why; forward and backward."""

    op: str
    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} × {self.op}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """Rows and totals. ``casts`` and ``cast_bytes`` are those of the graphs as they run: forward and backward
    after folding once a graph was differentiated, the forward alone before."""

    rows: tuple[Row, ...] = ()
    level: str = ""
    dtype: str = ""
    casts: int = 0
    cast_bytes: int = 0
    low_flops_share: float = 0.0
    by_precision: dict[str, int] = field(default_factory=dict)
    not_captured: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    #: shares of the work that ran "captured", under "autocast" and in "float32"; None unless ``inputs`` were given
    work: dict[str, float] | None = None
    #: the graphs after each stage, for pictures
    stages: tuple[Record, ...] = field(default=(), repr=False, compare=False)

    def why(self, text: str) -> list[Row]:
        """The rows whose node, op or module contains ``text``."""
        return [r for r in self.rows if text in r.node or text in r.op or text in r.module]

    def to_json(self) -> str:
        """The report as JSON: ``schema`` (its version), the totals, ``rows`` as objects. The schema is the file
        ``amp_compiler/render/schema.json``; the CLI's ``dump --format json`` adds the graph's nodes to it."""
        from .render.json import report_text

        return report_text(self)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One self-contained page: the graph after each pass, every op's reason, the totals. Written to ``path`` if
        one is given; returned in any case."""
        from .render.html import report_page

        text = report_page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        """The rows as a table, for notebooks."""
        from .render.notebook import table

        return table(self)

    @classmethod
    def from_json(cls, given: str | Mapping[str, Any]) -> Report:
        """A report from what ``to_json`` wrote."""
        from .render.json import SCHEMA_VERSION

        data = dict(json.loads(given) if isinstance(given, str) else given)
        if data.pop("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise ValueError(f"a report of another schema than {SCHEMA_VERSION}")
        rows = tuple(Row(**row) for row in data.pop("rows"))
        kernels = tuple(Kernel(**kernel) for kernel in data.pop("kernels", ()))
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(rows, **known, kernels=kernels)

    def __str__(self) -> str:
        if not self.rows and not self.not_captured:
            return "amp report: " + ("; ".join(self.notes) or "no op captured")
        head = ["node", "op", "module", "precision", "reason"]
        body = [[r.node, r.op, r.module, r.precision, r.reason] for r in self.rows]
        widths = [
            min(max(len(row[i]) for row in [head, *body]), limit)
            for i, limit in enumerate((28, 30, 34, 9, 200))
        ]
        lines = ["  ".join(_fit(text, width) for text, width in zip(row, widths, strict=True)).rstrip()
                 for row in [head, ["-" * w for w in widths[:4]] + ["-" * 6], *body]]  # fmt: skip
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.by_precision.items()))
        lines += ["", f"level {self.level}, {self.dtype}: {len(self.rows)} ops ({counts})",
                  f"casts: {self.casts} ({self.cast_bytes:,} bytes); "
                  f"matmul and convolution FLOPs in low precision: {self.low_flops_share:.1%}"]  # fmt: skip
        if self.work is not None:
            lines.append(work_line(self.work))
        lines += [f"kernel: {kernel}" for kernel in self.kernels]
        lines += [f"not captured: {what}" for what in self.not_captured]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def work_line(work: Mapping[str, float]) -> str:
    """The shares of work in one line."""
    return (f"work by FLOPs: {work['captured']:.1%} captured, {work['autocast']:.1%} under autocast, "
            f"{work['float32']:.1%} in float32 outside of graphs")  # fmt: skip


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


def graph_rows(gm: fx.GraphModule, index: int) -> list[Row]:
    """A row for each op of a rewritten graph; inserted casts and selections of outputs are no rows."""
    rows = []
    for name, inner in g.all_graphs(gm):
        for node in inner.graph.nodes:
            known = g.decision(node)
            if node.op != "call_function" or known is None or known.rule in ("inserted", "getitem"):
                continue
            values = [v for v in g.tensor_outputs(node) if v is not None]
            if not values and not g.is_higher_order(node):
                continue
            rows.append(
                Row(f"{name}.{node.name}" if name else node.name, g.op_name(node), g.module_path(node),
                    g.source_line(node), precision_name(known.precision), known.reason, known.rule, index,
                    node_flops(node))
            )  # fmt: skip
    return rows


def cast_totals(gm: fx.GraphModule) -> tuple[int, int]:
    """Number of float casts in a graph, and the bytes that they write."""
    number = total = 0
    for _, inner in g.all_graphs(gm):
        for node in inner.graph.nodes:
            if g.is_float_cast(node):
                value = g.tensor_of(node)
                assert value is not None
                number, total = number + 1, total + g.nbytes(value)
    return number, total


def kernel_counts(gm: fx.GraphModule) -> Counter[tuple[str, str]]:
    """(op, reason) of every op of ours in a graph."""
    return Counter((g.op_name(n), n.meta[g.KERNEL]) for _, inner in g.all_graphs(gm) for n in inner.graph.nodes
                   if g.KERNEL in n.meta and g.op_name(n).startswith("amp::"))  # fmt: skip


def build_report(
    rows: Iterable[Row], casts: Iterable[tuple[int, int]], *, level: str, dtype: torch.dtype,
    not_captured: Iterable[str] = (), notes: Iterable[str] = (),
    kernels: Iterable[Counter[tuple[str, str]]] = (), stages: Sequence[Record] = (),
    work: Mapping[str, float] | None = None,
) -> Report:  # fmt: skip
    """Add up rows and cast totals."""
    rows, casts = tuple(rows), list(casts)
    flops = sum(r.flops for r in rows)
    low = sum(r.flops for r in rows if r.precision in ("float16", "bfloat16"))
    return Report(
        rows, level, dtype_name(dtype), sum(n for n, _ in casts), sum(b for _, b in casts),
        low / flops if flops else 0.0, dict(Counter(r.precision for r in rows)), tuple(not_captured), tuple(notes),
        tuple(Kernel(op, count, reason) for (op, reason), count in sorted(sum(kernels, Counter()).items())),
        None if work is None else dict(work), tuple(stages),
    )  # fmt: skip
