"""The order of the passes, top to bottom, and nothing else but running them.

capture ─▶ normalize ─▶ mark_dtype_origin ─▶ assign_precision ─▶ insert_casts ─▶ autodiff
           └───────────────────────────── FORWARD ───────────────────────────┘
autodiff ─▶ fold_casts ─▶ fold_views ─▶ fuse_cast_matmul ─▶ lower_kernels ─▶ batch_casts ─▶ run
            └─────────────────────────── JOINT / INFERENCE ────────────────────────────┘
autodiff ─▶ scale_loss ─▶ fold_casts ─▶ fold_views ─▶ hoist_weight_casts ─▶ fuse_cast_matmul ─▶ lower_kernels
            └── STEP (a whole training step)  ─▶ batch_casts ─▶ accumulate_in_place or unscale_in_place ─▶ run
export ─▶ normalize ─▶ mark_dtype_origin ─▶ remove_dropout ─▶ fold_constants ─▶ fold_batch_norm
          └─────────────────────────────────── PREPARE ───────────────────────────────────────┘
       ─▶ assign_precision ─▶ insert_casts ─▶ freeze_parameters ─▶ fold_casts ─▶ save
          └──────────────────────────── CONVERT ──────────────────────────┘
       ─▶ widen_weights ─▶ fold_casts ─▶ fold_views ─▶ fuse_cast_matmul ─▶ lower_kernels ─▶ run
          └───────────────── RUN_CONVERTED (in memory, functional ATen) ────────────────┘
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from . import graph as g
from .errors import AmpError, ArgumentError, PipelineError
from .logs import log, wants
from .passes import (
    accumulate_in_place,
    assign_precision,
    batch_casts,
    fold_batch_norm,
    fold_casts,
    fold_constants,
    fold_views,
    freeze_parameters,
    fuse_cast_matmul,
    hoist_weight_casts,
    insert_casts,
    lower_kernels,
    mark_dtype_origin,
    normalize,
    remove_dropout,
    scale_loss,
    unscale_in_place,
    widen_weights,
)
from .passes.base import Context, Pass
from .verify import verify
from .view import GraphView, take_view

FORWARD = (normalize.PASS, mark_dtype_origin.PASS, assign_precision.PASS, insert_casts.PASS)
JOINT = (fold_casts.PASS, fold_views.PASS, fuse_cast_matmul.PASS, lower_kernels.PASS, batch_casts.PASS)
INFERENCE = JOINT
STEP = (
    scale_loss.PASS, fold_casts.PASS, fold_views.PASS, hoist_weight_casts.PASS, fuse_cast_matmul.PASS,
    lower_kernels.PASS, batch_casts.PASS, accumulate_in_place.PASS, unscale_in_place.PASS,
)  # fmt: skip
PREPARE = (normalize.PASS, mark_dtype_origin.PASS, remove_dropout.PASS, fold_constants.PASS, fold_batch_norm.PASS)
CONVERT = (assign_precision.PASS, insert_casts.PASS, freeze_parameters.PASS, fold_casts.PASS)
RUN_CONVERTED = (widen_weights.PASS, fold_casts.PASS, fold_views.PASS, fuse_cast_matmul.PASS, lower_kernels.PASS)
WEIGHTS = (batch_casts.PASS,)  # on the graph that makes the low copies of weights, once an update

ALL = {p.name: p for p in (*FORWARD, *JOINT, *INFERENCE, *STEP, *PREPARE, *CONVERT, *RUN_CONVERTED)}


@dataclass(frozen=True)
class Record:
    """One stage of one graph: what ran, how long, whether it changed anything, and the graph as text and as values."""

    name: str
    seconds: float
    modified: bool
    text: str
    graph: str = "forward"
    nodes: int = 0
    casts: int = 0
    note: str = ""
    view: GraphView = field(default_factory=GraphView, repr=False, compare=False)


@dataclass(frozen=True)
class Pipeline:
    """Passes in an order that was checked; ``switched_off`` names the ones a user does not want."""

    passes: tuple[Pass, ...]
    given: tuple[str, ...]
    switched_off: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        facts = set(self.given)
        ran: list[str] = []
        for step in self.passes:
            missing = [fact for fact in step.requires if fact not in facts]
            if missing:
                maker = next((p.name for p in ALL.values() if missing[0] in p.ensures), None)
                where = f"; '{maker}' makes it and must come earlier" if maker else ""
                raise PipelineError(
                    f"Pass '{step.name}' needs '{missing[0]}', which nothing before it makes{where}. "
                    f"Before it run: {', '.join(ran) or 'nothing'}."
                )
            facts.update(step.ensures)
            ran.append(step.name)

    def run(self, gm: fx.GraphModule, ctx: Context, history: list[Record], *, graph: str) -> None:
        """Run the passes on ``gm`` in place, verify after each, and write one record a pass."""
        facts = set(self.given)
        ran: list[str] = []
        begun, changed = len(history), True
        for step in self.passes:
            missing = [fact for fact in step.requires if fact not in facts]
            if step.name in self.switched_off or missing:
                note = "switched off" if step.name in self.switched_off else f"left out: needs '{missing[0]}'"
                history.append(record(step.name, 0.0, False, gm, graph, history, note, fresh=len(history) == begun))
                continue
            start = time.perf_counter()
            try:
                modified = step.run(gm, ctx)
            except AmpError:
                raise
            except Exception as error:
                raise PipelineError(
                    f"Pass '{step.name}' failed on a {graph} graph after {', '.join(ran) or 'capture'}: "
                    f"{type(error).__name__}: {error}. Switch it off with disable_passes=['{step.name}'] and report it."
                ) from error
            # Running all ops again on fakes is for graphs that changed since that was last done.
            changed = changed or modified
            if verify(gm, step.ensures, ctx, step.name, deep=None if changed else False):
                changed = False
            facts.update(step.ensures)
            ran.append(step.name)
            seconds, fresh = time.perf_counter() - start, modified or len(history) == begun
            history.append(record(step.name, seconds, modified, gm, graph, history, fresh=fresh))


@dataclass(frozen=True)
class Pipelines:
    """The passes for each kind of graph."""

    forward: Pipeline
    joint: Pipeline
    inference: Pipeline
    step: Pipeline
    weights: Pipeline
    prepare: Pipeline
    convert: Pipeline
    run_converted: Pipeline


def build(disable: Iterable[str] = (), backend: str = "eager", *, accumulating: bool = True) -> Pipelines:
    """The pipelines, with the named passes switched off."""
    off = frozenset(check_names(disable))
    if backend != "eager":
        off |= {step.name for step in ALL.values() if "eager" in step.requires}
    if not accumulating:
        off |= {step.name for step in ALL.values() if "accumulating" in step.requires}
    return Pipelines(
        forward=Pipeline(FORWARD, ("captured",), off),
        joint=Pipeline(JOINT, ("functional", "eager"), off),
        inference=Pipeline(INFERENCE, ("functional", "eager"), off),
        step=Pipeline(STEP, ("functional", "eager", "step", "accumulating"), off),
        weights=Pipeline(WEIGHTS, ("functional", "eager", "folded"), off),
        prepare=Pipeline(PREPARE, ("captured",), off),
        # fold_casts leaves alone what a graph writes to, and no gradient goes through this one
        convert=Pipeline(CONVERT, ("captured", "normalized", "origin", "functional"), off),
        run_converted=Pipeline(RUN_CONVERTED, ("functional", "eager"), off),
    )


def check_names(names: Iterable[str]) -> list[str]:
    """The names as a list; one that names no pass is an error that suggests the nearest."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError(f"disable_passes must be a list of names: write [{names!r}].")
    given = list(names)
    for name in given:
        if name not in ALL:
            near = difflib.get_close_matches(str(name), ALL, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ArgumentError(f"Unknown pass {name!r}.{hint} Passes: {', '.join(ALL)}.")
    return given


def record(
    name: str, seconds: float, modified: bool, gm: fx.GraphModule, graph: str, history: Sequence[Record],
    note: str = "", *, fresh: bool = True,
) -> Record:  # fmt: skip
    """What to write down of a stage. ``history``: the stages before it; where ``fresh`` is False, the last of them
    is the same graph, and nothing changed since."""
    if not fresh:
        log("passes", "%s %s: %.1f ms, %s", graph, name, seconds * 1e3, note or "changed nothing")
        return replace(history[-1], name=name, seconds=seconds, modified=modified, note=note)
    text, last = g.format_graph(gm), history[-1] if history else None
    if not modified and last is not None and (last.graph, last.text) == (graph, text):
        return record(name, seconds, modified, gm, graph, history, note, fresh=False)
    graphs = [inner for _, inner in g.all_graphs(gm)]
    casts = sum(g.is_float_cast(n) for inner in graphs for n in inner.graph.nodes)
    nodes = sum(len(inner.graph.nodes) for inner in graphs)
    before = None if graph == "forward" else next((r.view for r in reversed(history) if r.graph == "forward"), None)
    made = Record(name, seconds, modified, text, graph, nodes, casts, note, take_view(gm, before))
    log("passes", "%s %s: %.1f ms, %d nodes, %d casts", graph, name, seconds * 1e3, nodes, casts)
    if wants("casts") and history and history[-1].graph == graph:
        _log_casts(history[-1].view, made.view)
    return made


def _log_casts(before: GraphView, after: GraphView) -> None:
    old, new = {n.name: n for n in before.casts}, {n.name: n for n in after.casts}
    for name in [n for n in old if n not in new]:
        log("casts", "- %s: %s of %s, %s bytes", name, old[name].value, old[name].inputs[0], old[name].nbytes)
    for name in [n for n in new if n not in old]:
        log("casts", "+ %s: %s of %s, %s bytes", name, new[name].value, new[name].inputs[0], new[name].nbytes)
