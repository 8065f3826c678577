"""Python that Dynamo leaves uncaptured: where it begins and ends, and the modules that it calls.

Dynamo asks a callback about every Python frame that runs in a call of a compiled model. This file puts one of our own
in front of Dynamo's. Where Dynamo gives up on a frame, the frame gets a *trampoline* (``trampolines.py``): code with
the same arguments that passes them to a function of ours, which runs the original inside of ``Outside.plain``. A call
of an ``nn.Module`` from such code is passed to ``Outside.module`` in the same way. Captured code never executes these
frames, so it has no overhead, and no object of the user is changed: the callback belongs to one thread and lasts for
one call.

torch 2.13 internals, and why: ``torch._dynamo.optimize`` and ``OptimizeContext.callback`` (the only place to put a
callback in front of Dynamo's), ``ConvertFrameReturn``, ``set_code_exec_strategy`` (Dynamo marks code that it skips for
the whole process, ``nn.Module.__call__`` too), ``compile_lock`` (two threads may reach one frame), ``set_eval_frame``
(our own functions must not be looked at).
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame  # the C part, which does not import Dynamo

from . import settings, trampolines
from .followed import reading
from .trampolines import (
    SKIP,
    Outside,
    disabled_runner,
    existing_trampoline,
    guarded,
    is_library,
    module_runner,
    runner,
    trampoline,
)

_MODULE_CALL = nn.Module._wrapped_call_impl.__code__
#: the files whose functions run while the callback is active: these two, and that of the ``Outside`` object
_OWN_FILES = {__file__, trampolines.__file__}
_LEFT: set[types.CodeType] = set()  # code that is run as plain Python without asking Dynamo
_TRIES = 3  # code that fails this many times while it is traced is left as plain Python
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def belongs_to_us(file: str) -> None:
    """Have the callback ignore the functions of a file, because they run code that is not captured."""
    _OWN_FILES.add(file)


def compile_with(outside: Outside | None, function: Callable[..., Any], backend: Any, **options: Any) -> Any:
    """Compile with ``torch._dynamo.optimize``; ``outside``, if given, runs what is not captured. ``backend``: a
    ``Handle``."""
    import torch._dynamo

    strict = options.pop("error_on_graph_break", None)
    context: Any = torch._dynamo.optimize(backend, **options)
    if hasattr(context, "callback"):  # it has none where the environment disables Dynamo
        context.callback = _Configured(context.callback, bool(strict))
        if outside is not None:
            code = getattr(function, "__code__", None)
            context.callback = _Callback(context.callback, outside, backend, code)
    return context(function)


def left_as_plain(code: types.CodeType) -> None:
    """Have the callback leave a code object as plain Python, as if Dynamo had given up on it. What it calls is captured
    as ever."""
    _LEFT.add(code)


def unwatched(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make Dynamo ignore a method and everything that it calls."""
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        callback = eval_frame.set_eval_frame(None)
        try:
            return method(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(callback)

    return run


def watch_calls(disabled: bool) -> None:
    """Have Dynamo look again at calls of modules and of functions that the user has compiled, and, with ``disabled``,
    of disabled ones: any other compilation in this process makes Dynamo skip them."""
    _look_again(_MODULE_CALL)
    _look_again(_compiled_call())
    if disabled:
        _look_again(_disabled_call())


def watches_saved_tensors() -> bool:
    """True if saved-tensor hooks are active, as under ``torch.utils.checkpoint``: it computes the same once more in the
    backward, outside of our call, and the two must agree. (torch 2.13 has no public way to ask.)"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def look_at_forward(module: nn.Module) -> None:
    """Have Dynamo look at a module's forward even if another compilation told it to skip that."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if isinstance(code, types.CodeType) and not is_library(code):
        _look_again(code)


def watch_forward(module: nn.Module) -> types.CodeType | None:
    """The code that runs first in a module's forward, which Dynamo is made to look at; None if it isn't a function of
    the module's class."""
    function = None if "forward" in module.__dict__ else type(module).forward
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        _look_again(code)
        return code
    return None


def forward_is_library(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return isinstance(code, types.CodeType) and is_library(code)


def is_disabled(module: nn.Module) -> bool:
    """True if a module's forward is under ``torch.compiler.disable``."""
    return bool(getattr(type(module).forward, "_torchdynamo_disable", False))


def is_optimized(module: nn.Module) -> bool:
    """True if a module is the result of ``torch.compile(module)`` (an ``OptimizedModule``). Does not import Dynamo."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


_ACTION = eval_frame._FrameAction
_LOOK = eval_frame._FrameExecStrategy(_ACTION.DEFAULT, _ACTION.DEFAULT)


def _look_again(code: types.CodeType) -> None:
    eval_frame.set_code_exec_strategy(code, _LOOK)


@functools.cache
def _disabled_call() -> types.CodeType:
    """Return the code that wraps every function under ``torch.compiler.disable``, including each of Dynamo's graphs."""
    import torch._dynamo

    code: types.CodeType = torch._dynamo.disable(lambda: None).__code__
    return code


@functools.cache
def _compiled_call() -> types.CodeType:
    """Return the code that wraps every function under ``torch.compile``."""
    import torch._dynamo

    code: types.CodeType = torch._dynamo.optimize("eager")(lambda: None).__code__
    return code


class _Configured:
    """A callback in front of Dynamo's that sets its options while it compiles, and not while compiled code runs. With
    ``strict``, a graph break is an error.

    torch 2.13 keeps ``error_on_graph_break`` in a global variable and sets it for as long as the compiled code runs:
    graph breaks in other threads would fail too. Here it is set only while Dynamo compiles, which only one thread does
    at a time.
    """

    def __init__(self, dynamo: Any, strict: bool) -> None:
        self._torchdynamo_orig_backend, self._strict = dynamo, strict

    def __call__(self, frame: Any, entry: Any, state: Any) -> Any:
        from torch._dynamo import utils
        from torch._dynamo.convert_frame import compile_lock

        with compile_lock, settings.small_collections(), settings.capture_settings(), reading():
            if not self._strict:
                return self._torchdynamo_orig_backend(frame, entry, state)
            before = utils._get_error_on_graph_break()
            utils._set_error_on_graph_break(True)
            try:
                return self._torchdynamo_orig_backend(frame, entry, state)
            finally:
                utils._set_error_on_graph_break(before)


class _Callback:
    """A callback in front of Dynamo's that gives trampolines to the frames that Dynamo leaves."""

    def __init__(self, dynamo: Any, outside: Outside, handle: Any, outermost: types.CodeType | None) -> None:
        self._torchdynamo_orig_backend = dynamo  # Dynamo keys its caches by the innermost backend
        self._outermost = outermost  # the code that every call of the model begins with
        self._handle = handle
        self._outside = weakref.ref(outside)  # trampolines stay in Dynamo's caches after the model is freed
        self._empty: set[tuple[types.CodeType, int] | None] = set()  # rounds of a loop without a tensor op
        self._raised: dict[types.CodeType, int] = {}  # how many times in a row code has failed while it was traced

    def __call__(self, frame: Any, entry: Any, state: Any) -> Any:
        from torch._dynamo.convert_frame import compile_lock

        with compile_lock:  # Dynamo takes it too; another thread may be working on the same frame
            return existing_trampoline(frame.f_code) or self._look_at(frame, entry, state)

    def _look_at(self, frame: Any, entry: Any, state: Any) -> Any:
        from torch._dynamo.convert_frame import has_tensor_in_frame
        from torch._dynamo.exc import TorchRuntimeError
        from torch._dynamo.types import ConvertFrameReturn
        from torch._dynamo.utils import counters

        code: types.CodeType = frame.f_code
        outside = self._outside()
        if code.co_filename in _OWN_FILES or outside is None:
            return ConvertFrameReturn()
        self._handle.compiles(code)
        watch_calls(outside.watches_disabled)  # before the rest of this frame runs
        if code is _MODULE_CALL:
            outside.leaves_code = True
            return guarded(trampoline(code, module_runner(self._outside)))
        if code is _disabled_call():
            if outside.watches_disabled:
                return guarded(trampoline(code, disabled_runner(code, frame.f_globals, self._outside)))
            eval_frame.set_code_exec_strategy(code, SKIP)  # a returned strategy could not be revoked
            return ConvertFrameReturn(apply_to_code=False)
        if outside.is_forward(code):
            return guarded(trampoline(code, runner(code, frame.f_globals, self._outside, "forward")))
        library = is_library(code)
        users = not library or code is _compiled_call()
        outside.leaves_code |= users and code is not self._outermost
        if outside.is_plain() and users and _can_be_called(code):
            if not has_tensor_in_frame(frame):
                return ConvertFrameReturn()  # as Dynamo does, since a logger has many methods
            return guarded(trampoline(code, runner(code, frame.f_globals, self._outside, "captured")))
        if outside.is_plain() and library:
            return ConvertFrameReturn(apply_to_code=False)  # it would be captured together with what plain code runs in
        if code in _LEFT:
            return guarded(trampoline(code, runner(code, frame.f_globals, self._outside, "plain")))
        left = (code, _rounds_left(frame)) if self._handle.unrolls else None
        if left in self._empty:
            return ConvertFrameReturn(apply_to_code=False)
        try:
            result = self._torchdynamo_orig_backend(frame, entry, state)
        except TorchRuntimeError as error:
            # An op that fails on fakes fails on tensors too. The code may handle that; if not, torch's own message is
            # better than Dynamo's. Nothing of the frame has run, and the next call may have valid inputs.
            self._raised[code] = self._raised.get(code, 0) + 1
            if outside.under_autocast and ("dtype" in str(error) or "scalar type" in str(error)):
                self._raised[code] = _TRIES  # plain code runs under autocast, which casts what made this fail
            if self._raised[code] < _TRIES or not _can_be_called(code):
                return ConvertFrameReturn(apply_to_code=False)
            outside.leaves_code = True
            outside.raises(code)
            return guarded(trampoline(code, runner(code, frame.f_globals, self._outside, "plain")))
        self._raised.pop(code, None)
        outside.over_limit |= result.frame_exec_strategy.cur_action == _ACTION.RUN_ONLY
        if not outside.watches_disabled and any("torch.compiler.disable" in why for why in counters["graph_break"]):
            outside.watches_disabled = outside.leaves_code = True  # only now, because every graph is called that way
            _look_again(_disabled_call())
        if left is not None and result.guarded_code is None and "No ops traced" in (result.skip_reason or ""):
            self._empty.add(left)  # the same code may have something to do in another round of its loop
            return ConvertFrameReturn(apply_to_code=False)
        if result.guarded_code is not None or library or not _can_be_called(code) or not _gave_up(result):
            outside.leaves_code |= users and result.guarded_code is None
            return result
        outside.leaves_code = True
        return guarded(trampoline(code, runner(code, frame.f_globals, self._outside, "plain")))


def _rounds_left(frame: Any) -> int:
    """How often the loop will go round whose rest Dynamo has made a function of; 0 for other code."""
    values = (v for name, v in frame.f_locals.items() if name.startswith("___stack"))
    return next((operator.length_hint(v) for v in values if isinstance(v, type(iter(())))), 0)


def _gave_up(result: Any) -> bool:
    """True if Dynamo leaves a frame because it cannot capture it, and not for a temporary reason or because the frame
    has nothing to do with tensors."""
    reason = result.skip_reason or ""
    passing = ("dispatch mode", "already started", "generated code", "constructor", "no tensor-related objects")
    return not any(text in reason for text in passing)


def _can_be_called(code: types.CodeType) -> bool:
    """False for generators, which run only when iterated, and for special methods such as ``__enter__``, whose effects
    must last after they have returned."""
    special = code.co_name.startswith("__") and code.co_name.endswith("__") and code.co_name != "__call__"
    return not code.co_flags & _GENERATOR and not special and code.co_name not in ("<module>", "<genexpr>")


