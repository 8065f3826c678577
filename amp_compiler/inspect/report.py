"""``report()``: every op with its precision and reason, and the totals, built from graphs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import ir
from ..common.errors import ArgumentError
from ..common.files import write_text
from ..common.messages import suggestion
from ..ir.flops import node_flops
from ..ir.view import precision_name
from ..policy import Rule, dtype_name
from ..rewrite.records import Record
from .data import LOW, Kernel, ReportData, Row


@dataclass(frozen=True)
class Report(ReportData):
    """What a compiled model runs: one row per op, and totals. Made by ``report()``.

    It prints as a summary: the totals, one line for each part of the model (repeated layers share a line), then what is
    unusual: ops in fp32 and why, code that was not captured, notes. In a notebook it shows as a table.

    Attributes:
        rows: One per op, with ``node``, ``op``, ``module``, ``source``, ``precision``, ``reason``, ``rule``, ``graph``,
            ``flops``, ``causes`` (the nodes that led to the decision) and ``limit``.
        level: The level of the policy.
        dtype: The low-precision dtype.
        casts: The number of casts in the graphs as they run: forward and backward once a graph was differentiated.
        cast_bytes: The bytes that those casts write.
        low_flops_share: The share of the FLOPs of products and convolutions in low precision, from 0 to 1.
        by_precision: The number of ops by precision.
        not_captured: Code that runs outside of the graphs, with its source line and remedy.
        notes: Anything else that the user should know.
        kernels: The kernels of this package that run in place of torch's, how often, and why.
        work: The shares of the work by where it ran, if ``report(inputs=...)`` was called; else None.
        casts_by_module: Module path to its number of casts, or None if that is not known.
        scratch_bytes: Memory that the CPU kernels keep for their next calls, for all models of the process together.
        stages: The graphs after each pass, for pictures.

    Examples:
        >>> import torch
        >>> from amp_compiler import amp_compile
        >>> fast = amp_compile(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
        >>> result = fast(torch.ones(3, 4))
        >>> fast.report().why("linear_1")[0].precision
        'bfloat16'
        >>> print(fast.report().full(80))  # doctest: +ELLIPSIS
        0
          linear    bf16  a matrix product: fast on low-precision units, which multiply
                          low operands and add up in fp32
        1
          linear_1  bf16  a matrix product: fast on low-precision units, which multiply
                          low operands and add up in fp32
        <BLANKLINE>
        level O2, bfloat16: 2 ops (2 bfloat16)
        ...
    """

    def why(self, text: str) -> list[Row]:
        """Return the rows whose node, op or module contains ``text``. If there is none, an error suggests a name."""
        found = [r for r in self.rows if text in r.node or text in r.op or text in r.module]
        if not found:
            known = {name: None for r in self.rows for name in (r.op, r.node, r.module, *r.module.split(".")) if name}
            hint = suggestion(text, known, most=3, otherwise=self._ops())
            raise ArgumentError(f"No node, op or module of the report has {text!r} in its name.", hint=hint)
        return found

    def _ops(self) -> str:
        ops = sorted({r.op for r in self.rows})
        return f"Its ops are {', '.join(ops)}." if ops else "Nothing is captured yet: call the model first."

    def full(self, width: int | None = None) -> str:
        """Return every row as text, below its module. ``width`` is that of a line, by default the terminal's."""
        from .render.summary import full
        from .render.text import plain

        return plain(full(self, width))

    def to_json(self) -> str:
        """Return the report as JSON: ``schema`` (its version), the totals, and ``rows`` as objects.

        The schema is the file ``amp_compiler/inspect/render/schema.json``. The command ``dump --format json`` adds the
        nodes of the graph to it.
        """
        from .render.json import report_text

        return report_text(self)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return one self-contained HTML page: the graph after each pass, every op's reason, the totals. It is also
        written to ``path`` if one is given.
        """
        from .render.html import report_page

        text = report_page(self)
        if path is not None:
            write_text(path, text)
        return text

    def _repr_html_(self) -> str:
        """Return the summary, and the rows as a table, for notebooks."""
        from .render.notebook import table

        return table(self)

    @classmethod
    def from_json(cls, given: str | Mapping[str, Any]) -> Report:
        """Make a report from ``given``, the text that ``to_json`` returned or the object parsed from it."""
        from .render.json import SCHEMA_VERSION

        data = dict(json.loads(given) if isinstance(given, str) else given)
        if data.pop("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise ValueError(f"the report's schema version is not {SCHEMA_VERSION}")
        rows = tuple(Row(**{**row, "causes": tuple(row.get("causes", ()))}) for row in data.pop("rows"))
        kernels = tuple(Kernel(**kernel) for kernel in data.pop("kernels", ()))
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(rows, **known, kernels=kernels)

    def __str__(self) -> str:
        from .render.summary import lines
        from .render.text import plain

        return plain(lines(self))


def graph_rows(gm: fx.GraphModule, index: int) -> list[Row]:
    """Return a row for each op of a rewritten graph; inserted casts, selections and moves of DTensors have none."""
    rows = []
    for name, inner in ir.all_graphs(gm):
        for node in inner.graph.nodes:
            known = ir.decision(node)
            if node.op != "call_function" or known is None or known.rule in (Rule.INSERTED, Rule.SELECTED):
                continue
            values = [v for v in ir.tensor_outputs(node) if v is not None]
            if (not values and not ir.is_higher_order(node)) or ir.op_name(node) == ir.PLACED:
                continue
            rows.append(
                Row(f"{name}.{node.name}" if name else node.name, ir.op_name(node), ir.module_path(node),
                    ir.source_line(node), precision_name(known.precision), known.reason, known.rule, index,
                    node_flops(node), tuple(f"{name}.{c}" if name else c for c in known.causes),
                    known.limit)
            )  # fmt: skip
    return rows


def cast_totals(gm: fx.GraphModule) -> tuple[int, int]:
    """Return the number of float casts in a graph, and the bytes that they write."""
    number = total = 0
    for _, inner in ir.all_graphs(gm):
        for node in inner.graph.nodes:
            if ir.is_float_cast(node):
                value = ir.tensor_of(node)
                assert value is not None
                number, total = number + 1, total + ir.nbytes(value)
    return number, total


def kernel_counts(gm: fx.GraphModule) -> Counter[tuple[str, str]]:
    """Count (op, reason) of our own ops in a graph, and of products that were left to the library."""
    nodes = [n for _, inner in ir.all_graphs(gm) for n in inner.graph.nodes]
    ours = Counter((ir.op_name(n), n.meta[ir.KERNEL]) for n in nodes
                   if ir.KERNEL in n.meta and ir.op_name(n).startswith("amp::"))  # fmt: skip
    return ours + Counter((ir.op_name(n), n.meta[ir.LEFT]) for n in nodes
                          if ir.LEFT in n.meta and ir.op_name(n) in ("mm", "bmm", "addmm"))  # fmt: skip


def build_report(
    rows: Iterable[Row], casts: Iterable[tuple[int, int]], *, level: str, dtype: torch.dtype,
    not_captured: Iterable[str] = (), notes: Iterable[str] = (),
    kernels: Iterable[Counter[tuple[str, str]]] = (), stages: Sequence[Record] = (),
    work: Mapping[str, float] | None = None, scratch_bytes: int = 0,
) -> Report:  # fmt: skip
    """Build a report from rows and cast totals."""
    rows, casts = tuple(rows), list(casts)
    flops = sum(r.flops for r in rows)
    low = sum(r.flops for r in rows if r.precision in LOW)
    return Report(
        rows, level, dtype_name(dtype), sum(n for n, _ in casts), sum(b for _, b in casts),
        low / flops if flops else 0.0, dict(Counter(r.precision for r in rows)), tuple(not_captured), tuple(notes),
        tuple(Kernel(op, count, reason) for (op, reason), count in sorted(sum(kernels, Counter()).items())),
        None if work is None else dict(work), casts_by_module(stages), scratch_bytes, tuple(stages),
    )  # fmt: skip


def casts_by_module(stages: Sequence[Record]) -> dict[str, int] | None:
    """Return the number of casts by module, in the graphs that run: the last stage of each captured graph."""
    last: list[Record] = []
    for stage in stages:
        if stage.name == "capture" or not last:
            last.append(stage)
        elif stage.graph != "weights":
            last[-1] = stage
    return dict(Counter(node.module for stage in last for node in stage.view.casts)) if last else None
