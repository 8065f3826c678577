"""The back end: turns a graph from Dynamo into something that runs, and records what was done to it."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..capture import dynamo, effects
from ..capture.wrappers import given_low, has_units
from ..common.errors import BannedOpError, PolicyError
from ..common.logs import log
from ..common.messages import first_line
from ..common.torch_names import inside_ddp
from ..inspect.report import cast_totals, graph_rows, kernel_counts
from ..ir.nesting import has_parts
from ..passes import order
from ..policy import dtype_name
from ..policy.scopes import marked_modules, modules_of, paths_of
from ..rewrite.base import Context
from ..rewrite.records import record
from ..rewrite.verify import deep_by_default
from .kept import Kept, Lowered, Switch
from .options import Options, resolve_backend
from .prepare import prepare_kernels
from .state import Piece, State
from .work import named


class Backend:
    """Called by Dynamo with each graph: lowers it, runs the passes, differentiates it, and returns a callable."""

    def __init__(self, target: Any, options: Options, state: State) -> None:
        self.target, self.options, self.state = target, options, state
        self.forward = order.build(options.disable_passes).forward
        self.outermost = "" if inside_ddp(target) is None else "module"  # the path of what a caller calls
        self.given_low = given_low(target) if options.policy.rewrites else frozenset()
        self.keeps = False  # whether graphs are kept for ``follow``
        self.kept: list[Kept] = []
        self.handle: dynamo.Handle | None = None
        self.runs: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] | None = None

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        known = len(self.state.history)
        try:
            return self.compile(gm, example_inputs)
        except Exception:
            del self.state.history[known:]  # Dynamo may start over and discard this graph
            raise

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from ..capture.lower import why_not

        reason = dynamo.break_reason(gm)
        if reason is not None and str(reason) not in self.state.not_captured:
            self.state.not_captured.append(str(reason))
        refused = why_not(gm)
        if refused is not None:
            self.state.leave(f"a graph runs unchanged: {refused}")
            self.state.not_captured.append(f"a graph: {refused}")
            return gm.forward
        if not self.keeps:
            return self.make(lambda: self.lowered(gm, example_inputs), gm.forward, example_inputs)
        kept: list[Kept] = []

        def first() -> Lowered:
            kept.append(Kept(self.lowered(gm, example_inputs), gm, example_inputs))
            return kept[0].copy()

        run = self.make(first, gm.forward, example_inputs)
        if not kept:
            return run
        self.kept.append(kept[0])
        return Switch(self, kept[0], run)

    def make(
        self, lowered: Callable[[], Lowered], unchanged: Callable[..., Any], example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Rewrite and differentiate a graph by the policy, and return what runs it; ``unchanged`` if that fails."""
        with _guarded(self.state, "a graph could not be rewritten and runs unchanged") as rewritten:
            graph = self.run_passes(lowered, example_inputs)
        if not rewritten:
            return unchanged
        with _guarded(self.state, "AOTAutograd could not compile a graph; its casts are not folded") as compiled:
            result = self.run(graph, example_inputs)
        if not compiled:
            self.state.pieces.append(Piece(graph, graph_rows(graph, len(self.state.pieces)), cast_totals(graph)))
        run = self.state.handed.from_piece(graph, result if compiled else graph.forward)
        return named(len(self.state.pieces) - 1, run)

    def follow(self, options: Options, state: State) -> None:
        """Go on by the policy of other options; what was captured is compiled by it at its next call."""
        self.options, self.state = options, state

    def lowered(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Lowered:
        """Return a graph from Dynamo as the passes take it, with what only Dynamo knows of it. None of it depends on
        the policy's rules for single calls."""
        from ..capture.dtype_reads import all_followed
        from ..capture.lower import lower

        modules = modules_of(self.target)
        paths = paths_of(self.target)
        graph = lower(gm, example_inputs, self.options.policy, paths, inside=self.state.running.inside,
                      given_low=self.given_low)  # fmt: skip
        self.state.calls.number(graph, dynamo.piece_of_code())
        graph.meta[ir.STATE] = effects.kept_values(gm, example_inputs)
        self.mark_wide(gm, graph, example_inputs)
        self.mark_low(gm, graph, example_inputs)
        marked = marked_modules(modules)
        alone = self.state.running.inherited
        if alone is not None and alone[1] is not None:
            marked.setdefault(alone[0], alone[1])
        keep = self.options.keep_output_dtypes
        if not keep and self.options.policy.autocast_device is None:  # uncaptured code sees what fp32 code would see
            keep = not dynamo.returns_to_caller(gm, self.target, outermost=alone is None or alone[0] == self.outermost)
        twin, followed = None, False
        if self.asks_for_dtypes(gm):
            followed = all_followed(gm, graph)
            twin = self.twin(paths) if not followed else None
        return Lowered(graph, keep, marked, twin, self.around(gm), followed)

    def rewrite(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        """Lower a graph from Dynamo and run the passes on it."""
        return self.run_passes(lambda: self.lowered(gm, example_inputs), example_inputs)

    def run_passes(self, lowered: Callable[[], Lowered], example_inputs: Sequence[Any]) -> fx.GraphModule:
        start = time.perf_counter()
        found = lowered()
        graph = found.graph
        ctx = Context(
            self.options.policy,
            found.keep,
            found.marked,
            found.twin,
            found.around,
            backend=(backend := resolve_backend(self.options.backend, example_inputs)),
            costs=self.options.costs(backend),
            followed=found.followed,
            differentiated=torch.is_grad_enabled(),
        )
        history = [record("capture", time.perf_counter() - start, True, graph, "forward", [])]
        log("capture", "Dynamo: graph %d, %d nodes", len(self.state.pieces), len(graph.graph.nodes))
        self.forward.run(graph, ctx, history, graph="forward")
        self.state.history.extend(history)
        for note in ctx.notes:
            self.state.leave(note)
        return graph

    def mark_low(self, gm: fx.GraphModule, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """Tell ``assign_precision`` which inputs another piece made low, where one graph would have kept them so."""
        handed = self.state.handed
        if not handed.notes_low or self.options.policy.autocast_device is not None:
            return
        written = ir.written_nodes(graph.graph)
        places = [n for n in graph.graph.nodes if n.op == "placeholder"]
        for number, (place, value) in enumerate(zip(places, example_inputs, strict=False)):
            if not isinstance(value, torch.Tensor) or place in written:
                continue
            if value.dtype in self.given_low:
                place.meta[ir.LOW_INPUT] = value.dtype
            elif value.dtype is torch.float32 and not isinstance(value, torch.nn.Parameter):
                if (dtype := handed.low(value)) is not None:
                    place.meta[ir.LOW_INPUT] = dtype
                effects.guard_input(gm, number, handed.low)

    def mark_wide(self, gm: fx.GraphModule, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """Mark the wide inputs for ``assign_precision``. The same code may be called with an input that is wide once
        and not another time, so Dynamo's guards check that too, unless the whole call is one graph."""
        policy = self.options.policy
        looks = policy.keeps_wide or has_parts(gm) or self.options.device is not None
        if policy.autocast_device is not None or not looks:
            return
        places = [n for n in graph.graph.nodes if n.op == "placeholder"]
        own = {id(b) for m in modules_of(self.target).values() for b in m._buffers.values()}
        for number, (place, value) in enumerate(zip(places, example_inputs, strict=False)):
            if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or id(value) in own:
                continue
            if value.dtype is torch.float32:
                if why := self.state.handed.why(value):
                    place.meta[ir.WIDE] = why
                if not self.options.fullgraph:
                    effects.guard_input(gm, number, self.state.handed.why)

    def around(self, gm: fx.GraphModule) -> tuple[str, torch.dtype | None] | None:
        """Return the region of the model's code around the graph, if the graph does not show it: with a graph break
        inside, Dynamo runs the region as plain Python and compiles what is called there. Guards see a precision scope,
        but not an autocast region."""
        if any(getattr(n.target, "__name__", "") == "_enter_autocast" for n in gm.graph.nodes):
            return None  # this graph shows its regions
        found = self.state.running.entered.region_since()
        if found is not None and found[0] == "autocast":
            self.state.leave(
                "a graph break inside a torch.autocast region makes Dynamo run the region as plain Python: the code "
                "that it calls is compiled for that precision, and calls of the same code outside of the region may "
                "reuse it, or the reverse. Use precision(...) or set_precision, or move the break out of the region"
            )
        return found

    def asks_for_dtypes(self, gm: fx.GraphModule) -> bool:
        """True if the code behind a graph can depend on dtypes, and a pass wants to know."""
        from ..capture.dtype_reads import may_depend_on_dtype

        untouched = not self.options.policy.rewrites and not has_parts(gm)
        if untouched or "mark_dtype_origin" in self.options.disable_passes:
            return False
        return may_depend_on_dtype(gm)

    def twin(self, paths: dict[int, str]) -> fx.GraphModule | None:
        """Return the same frame traced in low precision (``capture/twin.py``); None if that fails."""
        from ..capture.twin import twin_of_frame

        try:
            return twin_of_frame(self.options.policy, paths)
        except Exception as error:
            low = dtype_name(self.options.policy.low)
            self.state.leave(f"the model's code reads dtypes and could not be traced in {low}, so every cast in it to "
                             f"float32 counts as the author's: {first_line(error, named=True)}")  # fmt: skip
            return None

    def run(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from ..capture.autodiff import compile_graph
        from ..capture.placed import restored
        from ..capture.regather import cast_again_in_backward

        piece = Piece(graph, graph_rows(graph, len(self.state.pieces)), cast_totals(graph))
        backend = resolve_backend(self.options.backend, example_inputs)
        ctx = Context(self.options.policy, self.options.keep_output_dtypes, backend=backend)
        steps = order.build(self.options.disable_passes)

        def joint(differentiated: fx.GraphModule, kind: str) -> None:
            chosen = steps.joint if kind == "joint" else steps.inference
            prepare_kernels(differentiated, self.options.policy, self.options.disable_passes)
            chosen.run(differentiated, ctx, self.state.history, graph=kind, after="autodiff")
            if kind == "joint" and backend == "eager" and has_units(self.target):
                cast_again_in_backward(differentiated, example_inputs)
            piece.casts, piece.kernels = cast_totals(differentiated), kernel_counts(differentiated)

        compiled = compile_graph(restored(graph), example_inputs, backend, joint)
        self.state.pieces.append(piece)
        return compiled


@contextlib.contextmanager
def _guarded(state: State, what: str) -> Iterator[list[bool]]:
    """Yield a list that is non-empty if the body succeeded. A failure becomes a warning and a note, so that a model
    that we cannot compile runs as it did without us. Errors meant for the user are raised."""
    done: list[bool] = []
    try:
        yield done
        done.append(True)
    except (BannedOpError, PolicyError):
        raise
    except Exception as error:
        if dynamo.is_dynamo_error(error) or deep_by_default():
            raise
        state.leave(f"{what}: {first_line(error, named=True)}")
