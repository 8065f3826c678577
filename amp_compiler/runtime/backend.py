"""From a graph that Dynamo hands over to something that runs: lower, rewrite, differentiate, remember.

``Captured`` is a function under Dynamo with our ``Backend``, the settings that capture needs, and the warnings that a
user must see; ``amp_compile`` and ``compile_train_step`` both call their model through one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .. import ir
from ..capture import dynamo
from ..common.errors import AmpError, AmpWarning, ArgumentError, BannedOpError, CaptureError, PolicyError
from ..common.logs import log
from ..inspect.report import Report, Row, build_report, cast_totals, graph_rows, kernel_counts
from ..ir.nesting import has_parts
from ..ir.wide import Handed
from ..kernels.cast_matmul import scratch_bytes
from ..passes import order
from ..policy import Policy, dtype_name
from ..policy.scopes import Surroundings, inside_call, marked_modules, modules_of, paths_of
from ..rewrite.base import Context
from ..rewrite.records import Record, record
from ..rewrite.verify import deep_by_default
from .outside import Uncaptured, suspended
from .work import Work, measure, named, unchanged

BACKENDS = ("auto", "eager", "inductor")


def users_frame() -> int:
    """The ``stacklevel`` by which a warning names the user's own line, not one of ours or torch's."""
    frame, level = sys._getframe(1), 1
    inside = ("amp_compiler", "torch.", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


@dataclass(frozen=True)
class Options:
    """The checked arguments of one ``amp_compile`` call."""

    policy: Policy
    backend: str = "auto"
    keep_output_dtypes: bool = True
    dynamic: bool | None = None
    fullgraph: bool = False
    disable_passes: tuple[str, ...] = ()


@dataclass
class Piece:
    """One captured graph: the rewritten forward, its rows, and what its executed form costs."""

    graph: fx.GraphModule
    rows: list[Row]
    casts: tuple[int, int]
    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)
    joint: fx.GraphModule | None = None  # forward, backward and loss scaling in one, of a whole training step


class _Running(threading.local):
    """What belongs to the call that this thread is in."""

    def __init__(self) -> None:
        #: (path, dtype): what ``set_precision`` says around a module that is compiled by itself
        self.inherited: tuple[str, torch.dtype | None] | None = None
        self.entered = Surroundings.now()  # the regions around the call


@dataclass
class State:
    """Everything that capturing adds; a fresh one for each compiled module."""

    pieces: list[Piece] = field(default_factory=list)
    history: list[Record] = field(default_factory=list)
    not_captured: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)
    work: Work | None = None  # measured on request
    running: _Running = field(default_factory=_Running)
    handed: Handed = field(default_factory=Handed)  # wide values that pieces of that call gave

    def missed(self, reasons: Iterable[str]) -> None:
        """Graph breaks that no captured graph tells of, as when the code before them had no tensor op."""
        for reason in reasons:
            if not any(reason in known for known in self.not_captured):
                self.not_captured.append(f"graph break: {reason}{dynamo.remedy(reason)}")
                log("capture", "graph break: %s", reason)

    def leave(self, text: str) -> None:
        """Something runs without us: a note in the report and a warning, once each."""
        if text not in self.notes:
            log("capture", "%s", text)
            self.notes.append(text)
            warnings.warn(f"amp_compiler: {text}", AmpWarning, stacklevel=users_frame())

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def report(self, policy: Policy, graph: int | None = None) -> Report:
        """Every op with its precision and why, over all graphs captured so far (or one of them)."""
        pieces = self.pieces if graph is None else [self.pieces[graph]]
        notes = list(self.notes)
        if not self.pieces and not notes:
            notes.append("nothing captured yet: call the model once with example inputs")
        return build_report(
            (row for piece in pieces for row in piece.rows), (piece.casts for piece in pieces),
            level=policy.level, dtype=policy.low, not_captured=self.not_captured, notes=notes,
            kernels=(piece.kernels for piece in pieces),
            stages=self.history if graph is None else (),
            work=None if self.work is None else self.work.shares,
            scratch_bytes=scratch_bytes(),
        )  # fmt: skip

    def measure(self, call: Callable[[], Any], target: Any) -> None:
        """Call the compiled model once more and see which share of its work runs where; the model stays as it is."""
        modules = modules_of(target)
        buffers = {id(b): b for m in modules.values() for b in m.buffers(recurse=False) if b is not None}
        paths = paths_of(target)
        with unchanged(list(buffers.values())):
            self.work = measure(call, lambda graph: sum(row.flops for row in self.pieces[graph].rows), paths)
        if self.work.wide:
            warnings.warn(
                f"amp_compiler: {self.work.shares['float32']:.1%} of the work ran in float32, because it is in code "
                "that is not captured and torch.autocast does not make it low: " + "; ".join(self.work.wide),
                AmpWarning,
                stacklevel=users_frame(),
            )


class Captured:
    """A function that runs in mixed precision: Dynamo captures it at its first call, ``backend`` rewrites the graphs.

    ``target``: the model, or function, whose modules the policy names. ``wide``: which of the arguments count as wide.
    """

    def __init__(
        self, function: Callable[..., Any], target: Any, options: Options, state: State, backend: Backend | None = None,
        wide: Callable[..., Any] = lambda *args, **kwargs: None,
    ) -> None:  # fmt: skip
        self.options, self.state, self._wide = options, state, wide
        self._backend = backend or Backend(target, options, state)
        leaves_code = not options.fullgraph and options.policy.level != "O0"
        self._outside = Uncaptured(target, options, state, self._backend) if leaves_code else None
        self._function, self._dynamic = function, options.dynamic
        self._run = self._compile()

    def _compile(self) -> Any:
        return dynamo.compile_frame(
            self._function, self._backend, dynamic=self._dynamic, fullgraph=self.options.fullgraph,
            outside=self._outside,
        )  # fmt: skip

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        before, pieces = dynamo.Tally.now(), len(state.pieces)
        wide = state.handed.call(self._wide(*args, **kwargs))
        outside = self._outside.call() if self._outside is not None else contextlib.nullcontext()
        with suspended(), self._no_autocast(), dynamo.capture_settings(), outside, wide, inside_call() as surroundings:
            outer, state.running.entered = state.running.entered, surroundings
            if surroundings.scopes:
                state.leave("a precision scope acts inside a model's code; around a call of it, it does nothing")
            try:
                result = self._run(*args, **kwargs)
            except Exception as error:
                state.warned.add("raised")
                explained = _explain(error, self.options.fullgraph)
                if explained is None:
                    raise
                if isinstance(explained, ArgumentError):  # the user's to mend: Dynamo's frames say nothing about it
                    raise explained.with_traceback(None) from None
                raise explained from error
            finally:
                state.running.entered = outer
        if Surroundings.now().opened > surroundings.opened and "scope" not in state.warned:
            state.warned.add("scope")
            why = "; ".join(before.breaks_since()) or "see not_captured in the report"
            state.leave(
                "a precision scope has a graph break inside it, and Dynamo then leaves the function that holds it as "
                "plain Python: its own ops run in fp32, what it calls inside the scope is compiled for the scope's "
                f"precision. Move the break out of the scope, or mark a module by set_precision. The break: {why}"
            )
        if not state.pieces:
            self._nothing_captured(before.skipped_since("raised" in state.warned))
        elif len(state.pieces) > pieces:
            state.missed(before.breaks_since())
        if self._outside is not None and self._outside.over_limit:
            self._over_limit(self._outside)
        return result

    def _over_limit(self, outside: Uncaptured) -> None:
        """Dynamo has given up on code that was compiled too often: begin again with graphs that fit more inputs."""
        limit = f"the model was compiled for {dynamo.RECOMPILE_LIMIT} different shapes or values, which is the limit"
        see = "TORCH_LOGS=recompiles shows what differs between them"
        if self._dynamic is not True:
            asked = " (dynamic=False makes a graph for each shape)" if self._dynamic is False else ""
            self.state.leave(f"{limit}{asked}. From now on its graphs have dynamic sizes, as with dynamic=True. {see}")
            self._dynamic = True
            outside.make_dynamic()
            self._run = self._compile()
        else:
            self.state.leave(
                f"{limit}, also with dynamic sizes. From now on the code that differs runs as plain Python, with its "
                f"products under torch.autocast. Pass a number that changes at every call as a tensor. {see}"
            )

    @contextlib.contextmanager
    def _no_autocast(self) -> Iterator[None]:
        """The policy wins over a surrounding ``torch.autocast``, which capture would bake into the graph."""
        if not torch._C._is_any_autocast_enabled():
            yield
            return
        if "autocast" not in self.state.warned:
            self.state.warned.add("autocast")
            warnings.warn(
                "An amp_compile'd module was called inside torch.autocast: its own policy wins, autocast is off "
                "inside it. Take the module out of the region (in a trainer: mixed_precision='no', bf16=False or "
                "precision=32), or set compiled.enabled = False there.",
                AmpWarning,
                stacklevel=users_frame(),
            )
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _nothing_captured(self, reason: str | None) -> None:
        """A call went by and there is no graph: fine if there was nothing to capture, else say so, once."""
        how = "in the precision it has" if self._outside is None else "with products under torch.autocast"
        text = f"no tensor op was captured: the model runs as plain Python, {how}"
        self.state.note(text)
        if reason is not None and "nothing" not in self.state.warned:
            self.state.warned.add("nothing")
            self.state.not_captured.append(f"the whole model: {reason}")
            warnings.warn(f"amp_compiler: {text}. {reason}.", AmpWarning, stacklevel=users_frame())


class Backend:
    """What Dynamo calls with each graph: lower, run the passes, differentiate, give back a callable."""

    def __init__(self, target: Any, options: Options, state: State) -> None:
        self.target, self.options, self.state = target, options, state
        self.forward = order.build(options.disable_passes).forward
        self.handle: dynamo.Handle | None = None
        self.runs: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] | None = None

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        known = len(self.state.history)
        try:
            return self.compile(gm, example_inputs)
        except Exception:
            del self.state.history[known:]  # Dynamo may start over; what it threw away is no history
            raise

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from ..capture.lower import why_not

        reason = dynamo.break_reason(gm)
        if reason is not None and str(reason) not in self.state.not_captured:
            self.state.not_captured.append(str(reason))
        refused = why_not(gm)
        if refused is not None:
            self.state.leave(f"a graph runs in the precision it has: {refused}")
            self.state.not_captured.append(f"a graph: {refused}")
            return gm.forward
        with _guarded(
            self.state, "a graph could not be rewritten and runs in the precision it has"
        ) as rewritten:
            graph = self.rewrite(gm, example_inputs)
        if not rewritten:
            return gm.forward
        with _guarded(self.state, "AOTAutograd could not take a graph; its casts run unfolded") as compiled:
            result = self.run(graph, example_inputs)
        if not compiled:
            self.state.pieces.append(Piece(graph, graph_rows(graph, len(self.state.pieces)), cast_totals(graph)))
        run = self.state.handed.from_piece(graph, result if compiled else graph.forward)
        return named(len(self.state.pieces) - 1, run)

    def rewrite(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        from ..capture.lower import lower

        start = time.perf_counter()
        modules = modules_of(self.target)
        paths = paths_of(self.target)
        graph = lower(gm, example_inputs, self.options.policy, paths)
        graph.meta[ir.STATE] = dynamo.kept_values(gm, example_inputs)
        self.mark_wide(gm, graph, example_inputs)
        marked = marked_modules(modules)
        alone = self.state.running.inherited
        if alone is not None and alone[1] is not None:
            marked.setdefault(alone[0], alone[1])
        keep = self.options.keep_output_dtypes
        if not keep and self.options.policy.autocast_device is None:  # uncaptured code sees what fp32 code would see
            keep = not dynamo.returns_to_caller(gm, self.target, outermost=alone is None)
        ctx = Context(
            self.options.policy,
            keep,
            marked,
            self.twin(gm, paths),
            self.around(gm),
        )
        history = [record("capture", time.perf_counter() - start, True, graph, "forward", [])]
        log("capture", "Dynamo: graph %d, %d nodes", len(self.state.pieces), len(graph.graph.nodes))
        self.forward.run(graph, ctx, history, graph="forward")
        self.state.history.extend(history)
        for note in ctx.notes:
            self.state.leave(note)
        return graph

    def mark_wide(self, gm: fx.GraphModule, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """Tell ``assign_precision`` which inputs are wide. The same code may be called with one that is not, or the
        other way round, so Dynamo's guards look at that too, unless the whole call is one graph."""
        applies = self.options.policy.level == "O2" or has_parts(gm)
        if not applies or self.options.policy.autocast_device is not None:
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
                    dynamo.guard_input(gm, number, self.state.handed.why)

    def around(self, gm: fx.GraphModule) -> tuple[str, torch.dtype | None] | None:
        """A region of the model's code that is not in the graph: Dynamo runs it as plain Python, because the graph
        breaks inside it, and compiles what is called there. Guards see a precision scope, not an autocast region."""
        if any(getattr(n.target, "__name__", "") == "_enter_autocast" for n in gm.graph.nodes):
            return None  # this graph shows its regions
        found = self.state.running.entered.region_since()
        if found is not None and found[0] == "autocast":
            self.state.leave(
                "a graph break inside a torch.autocast region makes Dynamo run the region as plain Python: the code "
                "that it calls is compiled for that precision, and the same code called elsewhere may reuse it, or the "
                "other way round. Use precision(...) or set_precision instead, or move the break out of the region"
            )
        return found

    def twin(self, gm: fx.GraphModule, paths: dict[int, str]) -> fx.GraphModule | None:
        """The same frame in the low dtype, if its code can depend on dtypes (``capture/twin.py``)."""
        from ..capture.twin import may_depend_on_dtype, twin_of_frame

        untouched = self.options.policy.level == "O0" and not has_parts(gm)
        if untouched or "mark_dtype_origin" in self.options.disable_passes:
            return None
        if not may_depend_on_dtype(gm):
            return None
        try:
            return twin_of_frame(self.options.policy, paths)
        except Exception as error:
            low = dtype_name(self.options.policy.low)
            self.state.leave(f"the model's code reads dtypes and could not be traced in {low}, so every cast in it to "
                             f"float32 counts as the author's: {first_line(error)}")  # fmt: skip
            return None

    def run(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from ..capture.autodiff import compile_graph

        piece = Piece(graph, graph_rows(graph, len(self.state.pieces)), cast_totals(graph))
        backend = resolve_backend(self.options.backend, example_inputs)
        ctx = Context(self.options.policy, self.options.keep_output_dtypes, backend=backend)
        steps = order.build(self.options.disable_passes)

        def joint(differentiated: fx.GraphModule, kind: str) -> None:
            chosen = steps.joint if kind == "joint" else steps.inference
            chosen.run(differentiated, ctx, self.state.history, graph=kind, after="autodiff")
            piece.casts, piece.kernels = cast_totals(differentiated), kernel_counts(differentiated)

        compiled = compile_graph(graph, example_inputs, backend, joint)
        self.state.pieces.append(piece)
        return compiled


@contextlib.contextmanager
def _guarded(state: State, what: str) -> Iterator[list[bool]]:
    """Yields a list that is non-empty when the body went through; a failure becomes a warning and a note,
    so that a model we cannot treat runs as it did without us. Errors meant for the user go up."""
    done: list[bool] = []
    try:
        yield done
        done.append(True)
    except (BannedOpError, PolicyError):
        raise
    except Exception as error:
        from torch._dynamo.exc import TorchDynamoException

        if isinstance(error, TorchDynamoException) or deep_by_default():
            raise
        state.leave(f"{what}: {first_line(error)}")


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def _explain(error: Exception, fullgraph: bool) -> Exception | None:
    """Our own error out of Dynamo's wrapping, or a clear one for what cannot be in one graph."""
    import torch._dynamo.exc as exc

    inner: BaseException | None = error
    for _ in range(8):
        if isinstance(inner, AmpError):
            return inner if inner is not error else None
        inner = getattr(inner, "inner_exception", None) or (inner.__cause__ if inner is not None else None)
    if isinstance(error, exc.FailOnRecompileLimitHit):
        return CaptureError(dynamo.RECOMPILE_LIMIT_REACHED)
    if isinstance(error, exc.Unsupported) or (fullgraph and isinstance(error, exc.TorchDynamoException)):
        first = str(error).strip().splitlines()[0]
        return CaptureError(
            f"With fullgraph=True the model must be one graph, and it is not: {first} "
            "Leave fullgraph off to compile the pieces, or take that code out of forward."
        )
    return None


def resolve_backend(backend: str, inputs: Sequence[Any]) -> str:
    """``auto`` is inductor when a CUDA tensor is there, eager otherwise."""
    if backend != "auto":
        return backend
    return "inductor" if any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs) else "eager"
