"""The default front end: ``torch.compile`` with a backend of our own.

Dynamo provides guards, graph breaks, dynamic shapes and re-compilation; this file only tells it what to do
with each graph and records what it could not capture. torch 2.13 internals: ``compile_subgraph_reason`` on
Dynamo's graphs and ``torch._dynamo.utils.counters`` (the only places that say why a graph ended).
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from ..common.errors import AmpError
from ..policy.scopes import is_inside_call
from . import wrappers
from .frames import compile_with, left_as_plain, unwatched
from .handle import Backend, clear_dead
from .handle import Handle as Handle
from .remedies import Reason as Reason
from .remedies import remedy as remedy
from .settings import PLACES
from .trampolines import Outside, is_library

#: signatures that one compiled module may have before Dynamo gives up on it
RECOMPILE_LIMIT = 64
RECOMPILE_LIMIT_REACHED = (
    "it was compiled for so many different values that Dynamo gave up. If Python code computes with a number that "
    "changes with every call (math.exp, a probability), pass the number as a tensor, such as torch.tensor(0.1), and "
    "compute with torch. TORCH_LOGS=recompiles shows which value it was"
)
_CALLERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Uncaptured:
    """A place where the graph ended or code that ran outside of any graph."""

    what: str
    source: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.source}){self.advice}" if self.source else self.what + self.advice


@unwatched  # by the frame callback of a model that this one is a part of
def compile_frame(
    target: Any,
    backend: Backend,
    *,
    dynamic: bool | None,
    fullgraph: bool,
    outside: Outside | None = None,
    error_on_graph_break: bool | None = None,
) -> Any:
    """Compile ``target`` as ``torch.compile`` does, with our backend; nothing is captured before the first call. The
    caller must keep ``backend`` alive.

    ``outside``: runs the code that is not captured. ``error_on_graph_break``: raise instead of running in pieces.

    ``isolate_recompiles``: Dynamo counts re-compilations per code object, so the same class compiled at several
    levels, or modules of torch.nn, would use up the limit together and then run uncompiled, in fp32.
    """
    clear_dead()
    if backend.handle is None:
        backend.handle, backend.runs = Handle(backend), weakref.WeakKeyDictionary()
        if wrappers.has_units(backend.target):
            wrappers.allow_breaks_in_loops()
            backend.handle.unrolls = True
    function = _caller(target) if isinstance(target, nn.Module) else target
    settings: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    if error_on_graph_break is not None:
        settings["error_on_graph_break"] = error_on_graph_break
    if isinstance(code := getattr(function, "__code__", None), CodeType):
        backend.handle.compiles(code)
    return compile_with(outside, function, backend.handle, dynamic=dynamic, nopython=fullgraph, **settings)


def is_capture_failure(error: Exception) -> bool:
    """True if Dynamo refused to capture code. None of that code has run then."""
    from torch._dynamo import exc

    if isinstance(error, exc.BackendCompilerFailed):
        return not isinstance(error.inner_exception, AmpError)
    return isinstance(error, (exc.TorchDynamoException, exc.ResumePrologueTracingError))


def is_dynamo_error(error: BaseException) -> bool:
    """True if Dynamo raised the error itself, perhaps to start over with other settings: it must reach Dynamo."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def is_unsupported(error: BaseException) -> bool:
    """True if Dynamo encountered code that cannot be in a graph."""
    from torch._dynamo.exc import Unsupported

    return isinstance(error, Unsupported)


def is_over_limit(error: BaseException) -> bool:
    """True if Dynamo has compiled code so often that it refuses to compile it again."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def _caller(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls the model. Compiling the module itself would leave an attribute on it.

    Each gets a code object with a name of its own, because Dynamo remembers by file, line and name which sizes changed:
    another model's batch size would otherwise make this model's dynamic.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return with_own_code(call)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a code object whose name no other has."""
    own: Any = function
    own.__code__ = own.__code__.replace(co_name=f"{own.__code__.co_name}_{next(_CALLERS)}")
    return function


# ------------------------------------------------------------------ a compiled model inside somebody else's trace
#
# torch 2.13: while tracing, Dynamo calls a function that is marked as constant and does not look into it. The mark is
# that of torch.compiler.assume_constant_result, which itself would import Dynamo when it decorates.

#: ``run_apart(function, args, kwargs)`` calls a function that Dynamo must not look at; ``needs_break`` creates it
run_apart: Callable[..., Any] | None = None


def is_ours() -> bool:
    """True, while code is traced, if the trace is ours, and not a ``torch.compile`` or ``torch.export`` by the user
    around a compiled model."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # torch.export without Dynamo
        return is_inside_call()
    while (inner := getattr(backend, "_torchdynamo_orig_backend", getattr(backend, "compiler_fn", None))) is not None:
        backend = inner
    return isinstance(backend, Handle)


def needs_break() -> bool:
    """True, while Dynamo traces for somebody else, if the graph has to end here, with a call of ``run_apart``."""
    global run_apart
    if run_apart is None:
        import torch._dynamo

        run_apart = torch._dynamo.disable(lambda function, args, kwargs: function(*args, **kwargs))
    return True


for _question in (is_ours, needs_break):
    _question._dynamo_marked_constant = True  # type: ignore[attr-defined]


def with_code_of_users(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own, in a file of its own if it is torch's: Dynamo captures no frame of
    ``nn.Sequential.forward``, but it does capture what that calls."""
    own: Any = function
    code: CodeType = own.__code__
    made: Any = FunctionType(code, own.__globals__, code.co_name, None, own.__closure__)
    if is_library(code):
        made.__code__ = code.replace(co_filename=f"<{code.co_qualname}>")
    return with_own_code(made)


def not_captured(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own, which is run as plain Python; what it calls is captured."""
    own: Any = function
    made: Any = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    left_as_plain(with_own_code(made).__code__)
    return functools.wraps(own)(made)


_WRAPPERS = tuple(
    os.path.join(os.path.dirname(torch.__file__), *parts) for parts in (("distributed",), ("nn", "parallel"))
)


def piece_of_code() -> int | None:
    """Return a number of the code that is being captured, the same if it is captured again; None outside of a capture.
    Dynamo has no public name for it: a graph does not tell which frame it is from."""
    known = torch._guards.CompileContext.current_compile_id()
    return known.frame_id if known is not None else None


def break_reason(gm: fx.GraphModule) -> Uncaptured | None:
    """Return why Dynamo ended this graph early; None if it didn't."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = getattr(reason, "user_stack", None) or []
    where = ""
    if stack:
        frame = stack[-1]
        if frame.filename.startswith(_WRAPPERS):
            return None  # the hooks of a wrapper; the module that they belong to is captured
        where = f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"
    why = Reason(str(reason.reason))
    return Uncaptured(f"graph break: {why}", where, remedy(why, "\n".join(frame.line or "" for frame in stack)))


def returns_to_caller(gm: fx.GraphModule, target: Any, outermost: bool) -> bool:
    """True if the outputs of this graph go to the caller of the compiled model, ``target``, and not to uncaptured code
    of the model: the graph's frame is the outermost one, or Dynamo's continuation of it, and it returns.

    ``outermost``: False while a module that is called by uncaptured code is compiled by itself.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False):
        return False
    try:
        code: CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    except AttributeError:  # the graph came another way
        return True
    function = target.forward if isinstance(target, nn.Module) else target
    name, own = code.co_name, getattr(function, "__code__", None)
    if name.startswith("torch_dynamo_resume_in_"):
        name = name.removeprefix("torch_dynamo_resume_in_").rpartition("_at_")[0]
    if own is not None and (code is own or (name == own.co_name and code.co_filename == own.co_filename)):
        return True
    if own is not None and outermost and name.rpartition("_")[0] == own.co_name:
        return code.co_filename in (own.co_filename, f"<{own.co_qualname}>")  # by with_code_of_users
    return name.startswith("call_") and code.co_filename == __file__ and outermost


@dataclass(frozen=True)
class Tally:
    """Dynamo's running counts, which are global to the process: compare a tally taken before with one taken after."""

    frames: int
    captured: int
    breaks: dict[str, int]

    @staticmethod
    def now() -> Tally:
        from torch._dynamo.utils import counters

        global _last_tally
        frames, breaks, last = counters["frames"], counters["graph_break"], _last_tally
        total, captured = frames.get("total", 0), frames.get("ok", 0)  # a missing key of a counter is slow
        if last.frames == total and last.captured == captured and len(last.breaks) == len(breaks):
            return last  # nothing was compiled since
        _last_tally = Tally(int(total), int(captured), {str(k): int(v) for k, v in breaks.items()})
        return _last_tally

    def breaks_since(self) -> list[Reason]:
        """Return the reasons for graph breaks since this tally was taken, one line each."""
        after = Tally.now()
        new = [reason for reason, count in after.breaks.items() if count > self.breaks.get(reason, 0)]
        return [Reason(reason, PLACES.get(reason, "")) for reason in new if reason.strip()]

    def skipped_since(self, failed_before: bool) -> str | None:
        """Return why a frame was left as plain Python since this tally was taken; None if none was.

        ``failed_before``: an earlier call raised, after which Dynamo does not look at that code again.
        """
        after = Tally.now()
        if breaks := self.breaks_since():
            return breaks[-1].in_full()
        if after.frames - self.frames > after.captured - self.captured:
            return "Dynamo left a frame as plain Python (an exception while tracing, or code that it does not trace)"
        if after.frames == self.frames and failed_before:
            return "an earlier call raised an exception, and Dynamo does not trace that code again"
        return None


_last_tally = Tally(0, 0, {})
