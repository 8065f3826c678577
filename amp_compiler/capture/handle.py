"""The object that Dynamo gets as a backend: Dynamo keeps it until the process ends, so it must not own a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Protocol

from torch import fx


class Backend(Protocol):
    """Turns each graph that Dynamo captures into a callable."""

    target: Any
    handle: Handle | None
    #: the callable that was returned to Dynamo -> the one that it runs
    runs: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] | None

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any: ...


class Handle:
    """Stands for a backend in Dynamo. Dynamo keeps every backend, and the callables that a backend returns, until the
    process ends; models, optimizers and graphs must not be kept alive by that. They live as long as ``backend``, which
    its owner holds.

    torch 2.13 internals: ``eval_frame.cached_backends`` holds backends. The entry for a compiled frame in the cache of
    its code object holds new code, which owns the compiled function in the module's globals; ``orig_code_map`` leads
    from the new code back to the old one, so that neither is ever freed. ``ExtraState.invalidate`` is what Dynamo calls
    itself when an object dies that an entry has guards on.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = weakref.ref(backend)
        self._codes: dict[int, weakref.ref[CodeType]] = {}
        self.unrolls = False  # a graph may end inside a loop of the model's code
        self.__name__ = "amp_compiler"
        weakref.finalize(backend, _DEAD.append, self).atexit = False

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        backend = self._backend()
        if backend is None:
            return gm.forward
        run = backend(gm, example_inputs)
        found = weakref.ref(run)

        def call(*args: Any) -> Any:
            run = found()
            assert run is not None  # the caller owns the backend
            return run(*args)

        assert backend.runs is not None
        backend.runs[call] = run
        return call

    def compiles(self, code: CodeType) -> None:
        """Remember code whose cache may hold an entry for this backend."""
        if id(code) not in self._codes:
            self._codes[id(code)] = weakref.ref(code)

    def clear_caches(self) -> None:
        """Remove what Dynamo's caches hold for a backend that was freed."""
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo import eval_frame
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        for code in filter(None, (known() for known in self._codes.values())):
            for entry in _debug_get_cache_entry_list(code):
                manager: Any = entry.guard_manager
                ours = entry.backend is not None and eval_frame.innermost_backend(entry.backend) is self
                if ours and manager.extra_state is not None:
                    manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("the compiled model is gone"))
                    # the rest is held by finalizers of classes and functions that it had guards on
                    manager.__dict__ = {"cache_entry": None, "extra_state": None}
        eval_frame.cached_backends.pop(id(self), None)


#: handles of backends that were freed. Their caches are cleared when the next model is compiled: at the moment that a
#: backend is freed, Dynamo may be using the same caches, in C++
_DEAD: list[Handle] = []


def clear_dead() -> None:
    """Remove what Dynamo's caches hold for backends that were freed."""
    while _DEAD:
        _DEAD.pop().clear_caches()


def innermost(compiler: Any) -> Handle | None:
    """Our backend that a compiler function of Dynamo is, or wraps; None for the backend of someone else."""
    from torch._dynamo.eval_frame import innermost_backend

    found = innermost_backend(compiler)
    return found if isinstance(found, Handle) else None


def is_handle(compiler: Any) -> bool:
    """True if a compiler function of Dynamo is one of our backends, or wraps one."""
    return innermost(compiler) is not None
