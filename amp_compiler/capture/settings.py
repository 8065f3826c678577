"""What Dynamo does otherwise while one of our modules is captured: its options, and what it has no option for.

torch 2.13 internals: the ``allow_rnn`` switch (Dynamo skips nn.LSTM and nn.GRU otherwise),
``record_runtime_overhead`` (code around each graph that tells the profiler how long its arguments took: a tenth of the
time that a small model's call takes), ``allow_unspec_int_on_nn_module``, and those that each function below names.
Dynamo's options are thread-local; what is replaced in Dynamo stays so for the process, and acts for our backends only.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch

from ..common.compat import can_be_printed_later
from .handle import is_handle

#: what Dynamo says of a graph break -> the user's line at which it last said so
PLACES: dict[str, str] = {}


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    """Set Dynamo's options for a call of one of our modules."""
    _tell_where_autocast_begins()
    _capture_slow_attention()
    _keep_prints()
    _note_places()
    with _option("allow_rnn"), _option("record_runtime_overhead", False):
        yield


def varying_numbers() -> contextlib.AbstractContextManager[None]:
    """Have Dynamo treat an int behind a module (``self.trainer.global_step``) as a variable once it has changed,
    instead of compiling the code for every value."""
    return _option("allow_unspec_int_on_nn_module")


@contextlib.contextmanager
def small_collections() -> Iterator[None]:
    """Have the garbage collector look only at objects that are made inside of the block. Capturing a graph makes enough
    of them to start full collections, and going over all objects of a process that has imported torch and a library of
    models takes as long as reading a small model. Nothing is changed if the user has frozen objects.

    Called with Dynamo's lock. Counting frozen objects takes as long as a collection, so it ends once there are some.
    """
    if not _Frozen.by_us and not _Frozen.by_user:
        _Frozen.by_user = bool(gc.get_freeze_count())
    if _Frozen.by_us or _Frozen.by_user:
        yield
        return
    gc.freeze()
    _Frozen.by_us = True
    try:
        yield
    finally:
        _Frozen.by_us = False
        gc.unfreeze()


class _Frozen:
    by_us = by_user = False


@contextlib.contextmanager
def _option(name: str, value: bool = True) -> Iterator[None]:
    import torch._dynamo

    config: Any = torch._dynamo.config
    before = getattr(config, name)
    setattr(config, name, value)
    try:
        yield
    finally:
        setattr(config, name, before)


def users_line(error: BaseException) -> str:
    """Return the line of the model's code at which Dynamo stopped, if its error says so."""
    stack = getattr(error, "real_stack", None)
    return f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}: {stack[-1].line}" if stack else ""


@functools.cache
def _capture_slow_attention() -> None:
    """Capture the ops of ``nn.TransformerEncoderLayer`` in eval mode, not one fused op that is on no list. The switch,
    ``torch.backends.mha.set_fastpath_enabled``, acts on the whole process, and other threads would see it. Instead, our
    backends alone make Dynamo read that it is off."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.functions import UserFunctionVariable

    call = UserFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        asked = self.fn is torch.backends.mha.get_fastpath_enabled
        if asked and is_handle(tx.output.compiler_fn):
            return ConstantVariable.create(False)
        return call(self, tx, args, kwargs)

    UserFunctionVariable.call_function = call_function  # type: ignore[method-assign]


@functools.cache
def _keep_prints() -> None:
    """Dynamo loses calls of ``reorderable_logging_functions`` in code that it inlines, which is all of a module here.
    For our backends they are noted on the outermost frame, which makes them when its graph has run. Constants of any
    kind may be printed (sizes, dtypes); in the body of a higher-order op only constants, and the rest breaks the graph.

    torch 2.13 internals: ``DebuggingVariable.call_function`` and the ``debug_locals`` of a frame."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.misc import DebuggingVariable

    call = DebuggingVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if tx.export or not is_handle(tx.output.compiler_fn):
            return call(self, tx, args, kwargs)
        if kwargs or not all(arg.is_python_constant() for arg in args):
            if tx.output.current_tracer.parent is not None:
                return call(self, tx, [self], {})  # which Dynamo refuses: no value of the body is known outside of it
            if not can_be_printed_later(self, [a for a in args if not a.is_python_constant()], kwargs):
                return call(self, tx, [self], {})  # which Dynamo refuses
        tx.output.root_tx.debug_locals.append((self, list(args)))
        return ConstantVariable.create(None)

    DebuggingVariable.call_function = call_function  # type: ignore[method-assign]


@functools.cache
def _note_places() -> None:
    """Dynamo counts graph breaks by their text; where a function is left as plain Python, nothing else is kept of them.
    An entry is as long-lived as Dynamo's own count."""
    from torch._dynamo.exc import Unsupported

    add = Unsupported.add_to_stats

    def add_to_stats(self: Any, category: str = "unimplemented") -> None:
        add(self, category)
        if where := users_line(self):
            PLACES[self.msg] = where

    Unsupported.add_to_stats = add_to_stats  # type: ignore[method-assign]


@functools.cache
def _tell_where_autocast_begins() -> None:
    """Record the module stack on the node that opens a ``torch.autocast`` region, where Dynamo writes none: the pass
    ``normalize`` needs it to know which modules are inside. The patch stays for the whole process, as it only adds a
    key to one node's meta."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    enter = AutocastModeVariable.enter

    def enter_with_stack(self: Any, tx: Any) -> Any:
        result = enter(self, tx)
        self.proxy.meta.setdefault("nn_module_stack", dict(tx.nn_module_stack))
        return result

    AutocastModeVariable.enter = enter_with_stack  # type: ignore[method-assign]
