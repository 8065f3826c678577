"""Running passes in an order that was checked: verify after each, and write down what each made of the graph."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from .. import ir
from ..common.errors import AmpError, PipelineError
from ..common.logs import log, wants
from ..ir.view import GraphView, take_view
from .base import MAKERS, Context, Pass
from .verify import verify


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
                maker = MAKERS.get(missing[0])
                where = f"; '{maker}' makes it and must come earlier" if maker else ""
                raise PipelineError(
                    f"Pass '{step.name}' needs '{missing[0]}', which nothing before it makes{where}. "
                    f"Before it run: {', '.join(ran) or 'nothing'}.",
                    pass_name=step.name,
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
            except AmpError as error:
                error.pass_name = error.pass_name or step.name
                raise
            except Exception as error:
                raise PipelineError(
                    f"Pass '{step.name}' failed on a {graph} graph after {', '.join(ran) or 'capture'}: "
                    f"{type(error).__name__}: {error}.",
                    pass_name=step.name,
                    hint=f"Switch it off with disable_passes=['{step.name}'] and report it.",
                ) from error
            # Running all ops again on fakes is for graphs that changed since that was last done.
            changed = changed or modified
            if verify(gm, step.ensures, ctx, step.name, deep=None if changed else False):
                changed = False
            facts.update(step.ensures)
            ran.append(step.name)
            seconds, fresh = time.perf_counter() - start, modified or len(history) == begun
            history.append(record(step.name, seconds, modified, gm, graph, history, fresh=fresh))


def record(
    name: str, seconds: float, modified: bool, gm: fx.GraphModule, graph: str, history: Sequence[Record],
    note: str = "", *, fresh: bool = True,
) -> Record:  # fmt: skip
    """What to write down of a stage. ``history``: the stages before it; where ``fresh`` is False, the last of them
    is the same graph, and nothing changed since."""
    if not fresh:
        log("passes", "%s %s: %.1f ms, %s", graph, name, seconds * 1e3, note or "changed nothing")
        return replace(history[-1], name=name, seconds=seconds, modified=modified, note=note)
    text, last = ir.format_graph(gm), history[-1] if history else None
    if not modified and last is not None and (last.graph, last.text) == (graph, text):
        return record(name, seconds, modified, gm, graph, history, note, fresh=False)
    graphs = [inner for _, inner in ir.all_graphs(gm)]
    casts = sum(ir.is_float_cast(n) for inner in graphs for n in inner.graph.nodes)
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
