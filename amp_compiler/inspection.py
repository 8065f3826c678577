"""Capture a model and run the passes on it, to show the graph after each stage in the CLI.

Nothing is trained and nothing is saved. The front end is ``torch.export``; a model that cannot be exported (a graph
break, code that depends on data) is captured with Dynamo instead, which calls it once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .capture.autodiff import compile_graph
from .capture.export import Exported, capture_export, capture_program
from .common.errors import ArgumentError, CaptureError
from .common.logs import log
from .common.messages import first_line
from .common.torch_names import pytree
from .compile import amp_compile
from .conversion.converted import ConvertedModel
from .cost.device import Device
from .cost.model import CostModel
from .inspect.data import Row
from .inspect.render.pieces import merge_pieces
from .inspect.report import Report, build_report, cast_totals, casts_by_module, graph_rows
from .ir.view import GraphView, NodeView
from .passes import order
from .policy import Policy
from .policy.scopes import marked_modules, modules_of
from .rewrite.base import Context
from .rewrite.records import Record, record
from .runtime.arguments import check_device
from .runtime.prepare import prepare_kernels

GRAPHS = ("forward", "inference", "joint")
CAPTURES = ("auto", "export", "dynamo")
STORED = "stored"  # the only stage of a converted model
AUTODIFF = "autodiff"  # the stage between the forward passes and those on the functional graph
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Inspection:
    """A model's graph after each stage. ``graph``: which of ``GRAPHS`` the last stages are of."""

    target: str
    graph: str
    stages: tuple[Record, ...]
    report: Report
    notes: tuple[str, ...] = ()

    @property
    def forward(self) -> GraphView:
        """The forward graph with its casts, which has the reasons."""
        return [s.view for s in self.stages if s.graph == "forward"][-1]

    @property
    def last(self) -> GraphView:
        return self.stages[-1].view

    def until(self, name: str | None) -> Inspection:
        """Return the same inspection up to the stage of that name."""
        if name is None:
            return self
        places = [i for i, stage in enumerate(self.stages) if stage.name == name]
        if not places:
            known = ", ".join(dict.fromkeys(s.name for s in self.stages))
            more = "" if self.graph == "joint" else " (--graph inference or joint has more)"
            raise ArgumentError(f"There is no stage {name!r} in a {self.graph} graph; its stages are {known}{more}.")
        stages = self.stages[: places[-1] + 1]
        casts = stages[-1].view.casts
        report = dataclasses.replace(
            self.report, casts=len(casts), cast_bytes=sum(n.nbytes for n in casts),
            casts_by_module=casts_by_module(stages), stages=stages,
        )  # fmt: skip
        return dataclasses.replace(self, stages=stages, report=report, graph=stages[-1].graph)


def inspect_model(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy,
    graph: str = "forward",
    capture: str = "auto",
    dynamic_shapes: Any = None,
    disable_passes: Sequence[str] = (),
    device: str | Device | None = None,
    target: str = "",
    progress: Progress = lambda text: None,
) -> Inspection:
    """Capture a model, rewrite it according to the policy, and record the graph after each stage.

    ``graph``: "forward" stops before autodiff, "inference" continues without and "joint" with a backward.
    ``device``: as for ``amp_compile``.
    """
    _check(graph, capture)
    notes: list[str] = []
    name = target or type(model).__name__
    args, kwargs = tuple(args), dict(kwargs or {})
    if capture == "dynamo":
        check_call(model, args, kwargs)
    else:
        progress("capturing with torch.export")
        start = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("always")  # torch also prints what it traced before a failure
                captured = capture_export(model, args, kwargs, dynamic_shapes, low=policy.low, policy=policy)
        except CaptureError as error:
            check_call(model, args, kwargs)
            if capture == "export":
                raise
            notes.append(f"captured by Dynamo, because it cannot be exported: {_cause(error)}")
            log("capture", "torch.export failed: %s", _cause(error))
        else:
            log("capture", "torch.export: %d warnings", len(caught))
            seconds = time.perf_counter() - start
            marked = marked_modules(modules_of(model))
            costs = _costs(device, policy)
            return _of_export(captured, policy, graph, marked, disable_passes, costs, name, notes, seconds, progress)
    return _of_dynamo(model, args, kwargs, policy, graph, disable_passes, device, name, notes, progress)


def inspect_program(
    program: torch.export.ExportedProgram,
    *,
    policy: Policy,
    graph: str = "forward",
    disable_passes: Sequence[str] = (),
    device: str | Device | None = None,
    target: str = "",
    progress: Progress = lambda text: None,
) -> Inspection:
    """Inspect a program from ``torch.export.load``. Its code cannot be traced again, so every cast in it counts as the
    author's. The program's graph is rewritten: pass a copy of a program that is still needed."""
    _check(graph, "export")
    progress("reading the program")
    costs = _costs(device, policy)
    captured = capture_program(program, policy)
    return _of_export(captured, policy, graph, {}, disable_passes, costs, target, [], 0.0, progress)


def inspect_converted(
    converted: ConvertedModel, *, graph: str = "forward", target: str = "", progress: Progress = lambda text: None
) -> Inspection:
    """Inspect a converted model as it is stored, with the reasons of its own report; "inference" also shows what
    runs."""
    _check(graph, "export")
    if graph == "joint":
        raise ArgumentError("A converted model is for inference and has no backward: --graph forward or inference.")
    progress("reading the program")
    gm = capture_program(converted.exported_program).graph
    stored = converted.report()
    rows = {row.node: row for row in stored.rows}
    first = record(STORED, 0.0, True, gm, "forward", [])
    nodes = tuple(_with_row(node, rows.get(node.name)) for node in first.view.nodes)
    stages = [dataclasses.replace(first, view=GraphView(nodes, first.view.classes))]
    totals = cast_totals(gm)
    if graph == "inference":
        ctx = Context(converted.policy, True)
        totals = _differentiate(gm, graph, converted.details.disable_passes, ctx, stages, progress)
    report = dataclasses.replace(
        stored, casts=totals[0], cast_bytes=totals[1], casts_by_module=casts_by_module(stages), stages=tuple(stages)
    )
    return Inspection(target, graph, tuple(stages), report, report.notes)


def _with_row(node: NodeView, row: Row | None) -> NodeView:
    if row is None:
        return node
    source = row.source or node.source
    return dataclasses.replace(node, precision=row.precision, reason=row.reason, rule=row.rule, source=source,
                               causes=row.causes)  # fmt: skip


def _costs(device: str | Device | None, policy: Policy) -> CostModel | None:
    found = check_device(device, policy)
    return CostModel(found) if found is not None else None


def _check(graph: str, capture: str) -> None:
    if graph not in GRAPHS:
        raise ArgumentError(f"Unknown graph {graph!r}: choose one of {', '.join(GRAPHS)}.")
    if capture not in CAPTURES:
        raise ArgumentError(f"Unknown front end {capture!r}: choose one of {', '.join(CAPTURES)}.")


# ---------------------------------------------------------------------------------------------- export


def _of_export(
    captured: Exported, policy: Policy, graph: str, marked: Mapping[str, torch.dtype], disable: Sequence[str],
    costs: CostModel | None, name: str, notes: list[str], seconds: float, progress: Progress,
) -> Inspection:  # fmt: skip
    if captured.twin_failed:
        notes.append(f"the code could not be traced in low precision: {captured.twin_failed}")
    gm = captured.graph
    ctx = Context(  # deep: the graphs shown are the ones that would run
        policy, True, marked, captured.twin, deep=True, costs=costs, differentiated=graph == "joint"
    )
    stages = [record("capture", seconds, True, gm, "forward", [])]
    progress("forward passes")
    order.build(disable).forward.run(gm, ctx, stages, graph="forward")
    totals = cast_totals(gm)
    rows = graph_rows(gm, 0)
    if graph != "forward":
        progress("differentiating" if graph == "joint" else "lowering to functional ATen")
        totals = _differentiate(gm, graph, disable, ctx, stages, progress)
    report = build_report(
        rows, [totals], level=policy.level, dtype=policy.low, notes=[*notes, *ctx.notes], stages=stages
    )
    return Inspection(name, graph, tuple(stages), report, tuple(report.notes))


def _differentiate(
    gm: fx.GraphModule, graph: str, disable: Sequence[str], ctx: Context, stages: list[Record], progress: Progress
) -> tuple[int, int]:
    inputs = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    if graph == "joint" and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        raise ArgumentError("A joint graph needs a parameter that requires a gradient: this model has none.")
    steps = order.build(disable)
    found: list[tuple[int, int]] = []
    start = time.perf_counter()

    def passes(functional: fx.GraphModule, kind: str) -> None:
        if kind != graph:
            raise CaptureError("no output of the model depends on a parameter, so there is no backward")
        stages.append(
            record(AUTODIFF, time.perf_counter() - start, True, functional, graph, stages)
        )
        progress(f"passes on the {graph} graph")
        prepare_kernels(functional, ctx.policy, disable)
        chosen = steps.joint if graph == "joint" else steps.inference
        chosen.run(functional, ctx, stages, graph=graph, after=AUTODIFF)
        found.append(cast_totals(functional))

    with torch.enable_grad() if graph == "joint" else torch.no_grad():
        compile_graph(gm, inputs, "eager", passes)
    return found[-1]


# ---------------------------------------------------------------------------------------------- dynamo


def _of_dynamo(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy, graph: str,
    disable: Sequence[str], device: str | Device | None, name: str, notes: list[str], progress: Progress,
) -> Inspection:  # fmt: skip
    progress("capturing with Dynamo")
    fast = amp_compile(model, policy.level, policy=policy, backend="eager", disable_passes=disable, device=device)
    with torch.enable_grad() if graph == "joint" else torch.no_grad():
        fast(*args, **kwargs)
    report = fast.report()
    if not fast.history:
        raise CaptureError("; ".join(report.not_captured or report.notes) or "nothing was captured")
    stages = merge_pieces([s for s in fast.history if graph != "forward" or s.graph == "forward"])
    casts = stages[-1].view.casts
    report = dataclasses.replace(
        report, notes=(*notes, *report.notes), casts=len(casts), cast_bytes=sum(n.nbytes for n in casts),
        casts_by_module=casts_by_module(stages[-1:]),
    )  # fmt: skip
    return Inspection(name, graph, tuple(stages), report, report.notes)


# -------------------------------------------------------------------------------------------------- helpers


def check_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if the model itself cannot be called with these inputs: its own error says more than a tracer's."""
    try:
        own_args, own_kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (tuple(args), dict(kwargs)))
        with torch.no_grad():
            model(*own_args, **own_kwargs)  # which may write to its inputs
    except Exception as error:  # the user's code may raise anything
        raise ArgumentError(f"The model cannot be called with these inputs: {first_line(error, named=True)}") from error


def _cause(error: Exception) -> str:
    return first_line(error.__cause__ if isinstance(error.__cause__, Exception) else error, named=True)


