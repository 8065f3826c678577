"""Trampolines: code that replaces a Python frame, passes its arguments to a function of ours and does nothing else.

The function runs the original inside of a method of ``Outside``, which handles the code that is not captured.
``frames.py`` decides which frames get one; trampolines live in Dynamo's code cache, under our backend only.

torch 2.13 internals, and why: ``GuardedCode`` with an empty ``GuardManagerWrapper`` (how a callback replaces a frame's
code), ``transform_code_object`` (assembles that code for the running Python version),
``_get_cache_entries_for_region`` (two threads may reach one frame), ``set_eval_frame`` (Dynamo must not look at our own
functions), ``trace_rules.check`` (files that Dynamo never captures).
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

from torch import nn
from torch._C._dynamo import eval_frame  # the C part, which does not import Dynamo

_PACKAGE = str(Path(__file__).parent.parent)
_ACTION = eval_frame._FrameAction
SKIP = eval_frame._FrameExecStrategy(_ACTION.SKIP, _ACTION.DEFAULT)


class Outside(Protocol):
    """Decides how code that is not captured runs."""

    watches_disabled: bool  # a function under torch.compiler.disable was called
    leaves_code: bool  # some code of the model is not in the graph of its outermost frame
    under_autocast: bool  # plain code runs under torch.autocast as a whole
    over_limit: bool  # Dynamo has compiled some code so often that it does not compile it again

    def is_plain(self) -> bool:
        """True if this thread is in code that runs as plain Python."""
        ...

    def plain(self, call: Callable[[], Any]) -> Any:
        """Run code that Dynamo does not capture."""
        ...

    def captured(self, call: Callable[[], Any]) -> Any:
        """Run code that Dynamo is going to look at."""
        ...

    def raises(self, code: types.CodeType) -> None:
        """Run ``code``, which fails each time it is traced, as plain Python from now on."""
        ...

    def module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Run a module that is called by uncaptured code; ``call`` runs it as it is, under Dynamo."""
        ...

    def is_forward(self, code: types.CodeType) -> bool:
        """Whether this is the forward of a module whose hooks run as plain Python."""
        ...

    def forward(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:
        """Such a forward; ``args`` begin with the module, ``call`` runs it as it is, under Dynamo."""
        ...


@functools.lru_cache(maxsize=4096)
def is_library(code: types.CodeType) -> bool:
    """True for code that Dynamo never captures by itself: torch's own and the standard library's."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(code))


def existing_trampoline(code: types.CodeType) -> Any:
    """Return a trampoline that another thread has made in the meantime, or None."""
    for entry in eval_frame._get_cache_entries_for_region(code, eval_frame.get_eval_frame_isolate_recompiles_id()):
        if getattr(entry.guard_manager, "is_trampoline", False):
            return guarded(entry.code)
    return None


def guarded(code: types.CodeType) -> Any:
    from torch._dynamo.guards import GuardManagerWrapper
    from torch._dynamo.types import GuardedCode, wrap_guarded_code
    from torch._guards import CompileId

    always: Any = GuardManagerWrapper()
    always.is_trampoline = True
    return wrap_guarded_code(GuardedCode(code, always, CompileId(frame_id=0, frame_compile_id=0)))


def module_runner(outside: weakref.ref[Outside]) -> Callable[..., Any]:
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


def disabled_runner(code: types.CodeType, scope: dict[str, Any], outside: weakref.ref[Outside]) -> Callable[..., Any]:
    """Return a function that runs user functions under ``torch.compiler.disable``, and all that they call, as plain
    code. Graphs, which are called the same way, run as they are."""
    plain, place = runner(code, scope, outside, "plain"), code.co_freevars.index("fn")
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


def runner(
    code: types.CodeType, scope: dict[str, Any], outside: weakref.ref[Outside],
    how: Literal["plain", "captured", "forward"],
) -> Callable[..., Any]:
    """Return what a trampoline calls: a function that runs a copy of the original code in a method of ``Outside``."""
    same = code.replace()
    if how == "plain":
        eval_frame.set_code_exec_strategy(same, SKIP)
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
            if found is not None and how == "forward":
                return found.forward(function, args, kwargs, call)
            return call() if found is None else getattr(found, how)(call)
        finally:
            eval_frame.set_eval_frame(callback)

    return run


def trampoline(code: types.CodeType, run: Callable[..., Any]) -> types.CodeType:
    """Return code for the same frame that only does ``return run((argument, ...), (free variable, ...))``."""
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
