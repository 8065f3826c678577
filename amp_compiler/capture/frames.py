"""Python that Dynamo leaves uncaptured: where it begins and ends, and the modules that it calls.

Dynamo asks a callback about every Python frame that runs in a call of a compiled model. This file puts one of our own
in front of Dynamo's. Where Dynamo gives a frame up, the frame gets a *trampoline*: code with the same arguments that
hands them to a function of ours, which runs the original inside of ``Outside.plain``. A call of an ``nn.Module`` that
comes from such code is handed to ``Outside.module`` in the same way. Captured code never executes these frames, so it
pays nothing, and no object of the user's is changed: the callback belongs to one thread and lasts for one call, and the
trampolines live in Dynamo's code cache, under our backend only.

torch 2.13 internals, and why: ``torch._dynamo.optimize`` and ``OptimizeContext.callback`` (the only place to put a
callback in front of Dynamo's), ``ConvertFrameReturn`` and ``GuardedCode`` with an empty ``GuardManagerWrapper`` (how a
callback gives a frame other code), ``transform_code_object`` (assembles that code for the Python version at hand),
``set_code_exec_strategy`` (Dynamo marks code that it skips for the whole process, ``nn.Module.__call__`` too),
``compile_lock`` and ``_get_cache_entries_for_region`` (two threads may meet one frame), ``set_eval_frame`` (our own
functions must not be looked at), ``trace_rules.check`` (files that Dynamo never captures).
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch._C._dynamo import eval_frame  # the C part: it does not import Dynamo

_MODULE_CALL = nn.Module._wrapped_call_impl.__code__
#: the files whose functions run while the callback is in force: this one, and that of the ``Outside`` in charge
_OWN_FILES = {__file__}
_PACKAGE = str(Path(__file__).parent.parent)
_TRIES = 3  # calls in which code may fail while it is traced before it is left as plain Python
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def belongs_to_us(file: str) -> None:
    """Leave alone the functions of a file, which run code that is not captured."""
    _OWN_FILES.add(file)


class Outside(Protocol):
    """What to do with code that is not captured."""

    watches_disabled: bool  # a function under torch.compiler.disable was met
    under_autocast: bool  # plain code runs under torch.autocast as a whole
    over_limit: bool  # Dynamo has compiled some code so often that it does not compile it again

    def is_plain(self) -> bool:
        """Whether this thread is in code that runs as plain Python."""
        ...

    def plain(self, call: Callable[[], Any]) -> Any:
        """Run code that Dynamo has left."""
        ...

    def captured(self, call: Callable[[], Any]) -> Any:
        """Run code that Dynamo is going to look at."""
        ...

    def raises(self, code: types.CodeType) -> None:
        """Code that fails each time it is traced runs as plain Python from now on."""
        ...

    def module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """A module that is called by uncaptured code; ``call`` runs it as it is, under Dynamo."""
        ...


def compile_with(outside: Outside | None, function: Callable[..., Any], backend: Any, **options: Any) -> Any:
    """``torch._dynamo.optimize`` with ``outside``, if given, in charge of what is not captured; ``backend``: a
    ``dynamo.Handle``."""
    import torch._dynamo

    strict = options.pop("error_on_graph_break", None)
    context: Any = torch._dynamo.optimize(backend, **options)
    if strict and hasattr(context, "callback"):
        context.callback = _Strict(context.callback)
    if outside is not None and hasattr(context, "callback"):  # it has none where the environment disables Dynamo
        context.callback = _Callback(context.callback, outside, backend)
    return context(function)


def unwatched(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that Dynamo does not look at, nor at anything that it calls."""
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        callback = eval_frame.set_eval_frame(None)
        try:
            return method(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(callback)

    return run


def watch_calls(disabled: bool) -> None:
    """Have calls of modules and of functions that the user has compiled looked at again, and those of disabled ones if
    asked: whoever else compiles in this process has Dynamo skip them."""
    _look_again(_MODULE_CALL)
    _look_again(_compiled_call())
    if disabled:
        _look_again(_disabled_call())


def watches_saved_tensors() -> bool:
    """Whether somebody watches what autograd saves, as ``torch.utils.checkpoint`` does: it computes the same once more
    in the backward, outside of our call, and the two must agree. (torch 2.13 has no public question for it.)"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@functools.lru_cache(maxsize=4096)
def is_library(code: types.CodeType) -> bool:
    """Whether Dynamo never captures this code by itself: torch's own, the standard library's."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(code))


def look_at_forward(module: nn.Module) -> None:
    """Have Dynamo look at a module's forward, which another compilation may have told it to skip."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if isinstance(code, types.CodeType) and not is_library(code):
        _look_again(code)


def forward_is_library(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return isinstance(code, types.CodeType) and is_library(code)


def is_disabled(module: nn.Module) -> bool:
    """Whether a module's forward is under ``torch.compiler.disable``."""
    return bool(getattr(type(module).forward, "_torchdynamo_disable", False))


def is_optimized(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile(module)`` gives (``OptimizedModule``); Dynamo is not imported for it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


_ACTION = eval_frame._FrameAction
_LOOK = eval_frame._FrameExecStrategy(_ACTION.DEFAULT, _ACTION.DEFAULT)
_SKIP = eval_frame._FrameExecStrategy(_ACTION.SKIP, _ACTION.DEFAULT)


def _look_again(code: types.CodeType) -> None:
    eval_frame.set_code_exec_strategy(code, _LOOK)


@functools.cache
def _disabled_call() -> types.CodeType:
    """The code that every function under ``torch.compiler.disable`` is wrapped in, each graph of Dynamo's too."""
    import torch._dynamo

    code: types.CodeType = torch._dynamo.disable(lambda: None).__code__
    return code


@functools.cache
def _compiled_call() -> types.CodeType:
    """The code that every function under ``torch.compile`` is wrapped in."""
    import torch._dynamo

    code: types.CodeType = torch._dynamo.optimize("eager")(lambda: None).__code__
    return code


class _Strict:
    """In front of Dynamo's callback: a graph break is an error.

    torch 2.13 keeps ``error_on_graph_break`` in a variable of the process, and sets it for as long as the compiled code
    runs: other threads would fail on breaks of their own. Here it is set while Dynamo compiles, which only one thread
    does at a time.
    """

    def __init__(self, dynamo: Any) -> None:
        self._torchdynamo_orig_backend = dynamo

    def __call__(self, frame: Any, entry: Any, state: Any) -> Any:
        from torch._dynamo import utils
        from torch._dynamo.convert_frame import compile_lock

        with compile_lock:
            before = utils._get_error_on_graph_break()
            utils._set_error_on_graph_break(True)
            try:
                return self._torchdynamo_orig_backend(frame, entry, state)
            finally:
                utils._set_error_on_graph_break(before)


class _Callback:
    """In front of Dynamo's callback."""

    def __init__(self, dynamo: Any, outside: Outside, handle: Any) -> None:
        self._torchdynamo_orig_backend = dynamo  # Dynamo keeps caches by the innermost backend
        self._handle = handle
        self._outside = weakref.ref(outside)  # trampolines stay in Dynamo's caches when the model is gone
        self._raised: dict[types.CodeType, int] = {}  # how often in a row code has failed while it was traced

    def __call__(self, frame: Any, entry: Any, state: Any) -> Any:
        from torch._dynamo.convert_frame import compile_lock

        with compile_lock:  # Dynamo takes it too; another thread may be at work on the same frame
            return _trampoline_of(frame.f_code) or self._look_at(frame, entry, state)

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
        if code is _MODULE_CALL:
            return _guarded(_trampoline(code, _module_runner(self._outside)))
        if code is _disabled_call():
            if outside.watches_disabled:
                return _guarded(_trampoline(code, _disabled_runner(code, frame.f_globals, self._outside)))
            eval_frame.set_code_exec_strategy(code, _SKIP)  # a strategy that is returned could not be taken back
            return ConvertFrameReturn(apply_to_code=False)
        library = is_library(code)
        users = not library or code is _compiled_call()
        if outside.is_plain() and users and _can_be_called(code):
            if not has_tensor_in_frame(frame):
                return ConvertFrameReturn()  # as Dynamo does: a logger's methods are many
            return _guarded(_trampoline(code, _runner(code, frame.f_globals, self._outside, "captured")))
        try:
            result = self._torchdynamo_orig_backend(frame, entry, state)
        except TorchRuntimeError as error:
            # An op that fails on fakes fails on tensors too; the code may handle it, and if not, torch's own words are
            # better than Dynamo's. Nothing of the frame has run. Wrong inputs may be right the next time.
            self._raised[code] = self._raised.get(code, 0) + 1
            if outside.under_autocast and ("dtype" in str(error) or "scalar type" in str(error)):
                self._raised[code] = _TRIES  # what autocast would have cast: as plain code it does
            if self._raised[code] < _TRIES or not _can_be_called(code):
                return ConvertFrameReturn(apply_to_code=False)
            outside.raises(code)
            return _guarded(_trampoline(code, _runner(code, frame.f_globals, self._outside, "plain")))
        self._raised.pop(code, None)
        outside.over_limit |= result.frame_exec_strategy.cur_action == _ACTION.RUN_ONLY
        if not outside.watches_disabled and any("torch.compiler.disable" in why for why in counters["graph_break"]):
            outside.watches_disabled = True  # not before: every graph is behind such a call
            _look_again(_disabled_call())
        if result.guarded_code is not None or library or not _can_be_called(code) or not _gave_up(result):
            return result
        return _guarded(_trampoline(code, _runner(code, frame.f_globals, self._outside, "plain")))


def _trampoline_of(code: types.CodeType) -> Any:
    """The trampoline that another thread has made since this one looked for one, or None."""
    for entry in eval_frame._get_cache_entries_for_region(code, eval_frame.get_eval_frame_isolate_recompiles_id()):
        if getattr(entry.guard_manager, "is_trampoline", False):
            return _guarded(entry.code)
    return None


def _gave_up(result: Any) -> bool:
    """Whether Dynamo leaves a frame because it cannot capture it, as opposed to for a circumstance that may pass, or
    because it works on nothing that we care for."""
    reason = result.skip_reason or ""
    passing = ("dispatch mode", "already started", "generated code", "constructor", "no tensor-related objects")
    return not any(text in reason for text in passing)


def _can_be_called(code: types.CodeType) -> bool:
    """Generators run when somebody asks them; what a special method opens must stay open when it has returned."""
    special = code.co_name.startswith("__") and code.co_name.endswith("__") and code.co_name != "__call__"
    return not code.co_flags & _GENERATOR and not special and code.co_name not in ("<module>", "<genexpr>")


def _guarded(code: types.CodeType) -> Any:
    from torch._dynamo.guards import GuardManagerWrapper
    from torch._dynamo.types import GuardedCode, wrap_guarded_code
    from torch._guards import CompileId

    always: Any = GuardManagerWrapper()
    always.is_trampoline = True
    return wrap_guarded_code(GuardedCode(code, always, CompileId(frame_id=0, frame_compile_id=0)))


def _module_runner(outside: weakref.ref[Outside]) -> Callable[..., Any]:
    def run(values: tuple[Any, ...], cells: tuple[Any, ...]) -> Any:
        callback = eval_frame.set_eval_frame(None)
        module, args, kwargs = values

        def call() -> Any:
            compiled = module._compiled_call_impl
            eval_frame.set_eval_frame(callback)
            try:
                return compiled(*args, **kwargs) if compiled is not None else module._call_impl(*args, **kwargs)
            finally:
                eval_frame.set_eval_frame(None)

        try:
            found = outside()
            return call() if found is None else found.module(module, args, kwargs, call)
        finally:
            eval_frame.set_eval_frame(callback)

    return run


def _disabled_runner(code: types.CodeType, scope: dict[str, Any], outside: weakref.ref[Outside]) -> Callable[..., Any]:
    """Functions of the user's that are disabled for Dynamo run as plain code, and all that they call. Graphs go by."""
    plain, place = _runner(code, scope, outside, "plain"), code.co_freevars.index("fn")
    same = code.replace()
    users: dict[Any, bool] = {}

    def run(values: tuple[Any, ...], cells: tuple[Any, ...]) -> Any:
        inner: Any = getattr(cells[place].cell_contents, "__code__", None)
        known = users.get(inner)
        if known is None:
            file = "" if inner is None else inner.co_filename
            ours = not file or file.startswith(("<", _PACKAGE))
            known = users[inner] = not ours and not is_library(inner)
        if known:
            return plain(values, cells)
        return types.FunctionType(same, scope, code.co_name, None, cells)(*values[0], **values[1])

    return run


def _runner(
    code: types.CodeType, scope: dict[str, Any], outside: weakref.ref[Outside], how: Literal["plain", "captured"]
) -> Callable[..., Any]:
    """What a trampoline calls: the original code, under another identity, inside of a method of ``Outside``."""
    same = code.replace()
    if how == "plain":
        eval_frame.set_code_exec_strategy(same, _SKIP)
    plain, named = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[plain:named]
    more, keywords = bool(code.co_flags & inspect.CO_VARARGS), bool(code.co_flags & inspect.CO_VARKEYWORDS)

    def run(values: tuple[Any, ...], cells: tuple[Any, ...]) -> Any:
        callback = eval_frame.set_eval_frame(None)
        function = types.FunctionType(same, scope, code.co_name, None, cells or None)
        args = values[:plain] + (values[named] if more else ())
        kwargs = dict(zip(names, values[plain:named], strict=True))
        if keywords:
            kwargs.update(values[-1])

        def call() -> Any:
            eval_frame.set_eval_frame(callback)
            try:
                return function(*args, **kwargs)
            finally:
                eval_frame.set_eval_frame(None)

        try:
            found = outside()
            return call() if found is None else getattr(found, how)(call)
        finally:
            eval_frame.set_eval_frame(callback)

    return run


def _trampoline(code: types.CodeType, run: Callable[..., Any]) -> types.CodeType:
    """Code for the same frame that does nothing but ``return run((argument, ...), (free variable, ...))``."""
    from torch._dynamo import bytecode_transformation as assembler

    given = code.co_argcount + code.co_kwonlyargcount
    given += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)

    def edit(instructions: list[Any], options: dict[str, Any], *_: Any) -> None:
        make = assembler.create_instruction
        start = next(i for i, known in enumerate(instructions) if known.opname == "RESUME")
        body = [*instructions[: start + 1], *assembler.add_push_null(make("LOAD_CONST", argval=run))]
        for name in code.co_varnames[:given]:
            body.append(make("LOAD_DEREF" if name in code.co_cellvars else "LOAD_FAST", argval=name))
        body.append(make("BUILD_TUPLE", arg=given))
        closure = "LOAD_CLOSURE" if sys.version_info < (3, 13) else "LOAD_FAST"
        body += [make(closure, argval=name) for name in code.co_freevars]
        body.append(make("BUILD_TUPLE", arg=len(code.co_freevars)))
        body += [*assembler.create_call_function(2, False), make("RETURN_VALUE")]
        options["co_consts"] = (*options["co_consts"], run)
        instructions[:] = body

    made: Any = assembler.transform_code_object(code, edit)
    result: types.CodeType = made[0] if isinstance(made, tuple) else made
    return result
