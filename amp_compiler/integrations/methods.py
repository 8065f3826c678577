"""Methods of a module, replaced in place and put back, for trainers that call other methods than ``forward``."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

_CLASS = object()  # the module has no attribute of its own by that name: its class has the method


class InPlaceMethod:
    """Stands in for a method of one module. A copy or a pickle of the module gets the module's own method.

    It is a ``types.MethodType`` to ``isinstance``: Fabric's ``mark_forward_method`` refuses anything else.

    ``run``: what is called instead.
    """

    def __init__(self, module: nn.Module, name: str, run: Callable[..., Any]) -> None:
        self.module, self.name, self.run = module, name, run
        self.__wrapped__ = getattr(module, name)  # trainers read its signature
        self.__self__, self.__func__ = module, _unbound(run, self.__wrapped__)
        self.__name__, self.__code__ = name, self.__func__.__code__
        self._before = module.__dict__.get(name, _CLASS)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return types.MethodType

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def install(self) -> None:
        """Put this in the place of the method."""
        self.module.__dict__[self.name] = self

    def remove(self) -> None:
        """Put the method back, unless something else has replaced it since."""
        _restore(self.module.__dict__, self.name, self, self._before)

    def __reduce__(self) -> Any:
        # the copy of the module exists by then, but has no attributes yet: its class's method is found
        return (getattr, (self.module, self.name)) if self._before is _CLASS else (_same, (self._before,))


def _same(value: Any) -> Any:
    return value


def _unbound(run: Callable[..., Any], method: Callable[..., Any]) -> Any:
    """Return ``run`` as a function of the module, too, with the signature of ``method``."""

    def function(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    own = getattr(method, "__func__", None)
    return function if own is None else functools.wraps(own)(function)


@contextlib.contextmanager
def replaced(module: nn.Module, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods of a module while the context lasts.

    Pass the same objects each time: Dynamo guards on what captured code finds on the module.
    """
    held = module.__dict__
    before = {name: held.get(name, _CLASS) for name in methods}
    held.update(methods)
    try:
        yield
    finally:
        for name, method in methods.items():
            _restore(held, name, method, before[name])


def _restore(held: dict[str, Any], name: str, current: Any, before: Any) -> None:
    """Put an attribute back, unless something else has replaced it since."""
    if held.get(name) is not current:
        return
    if before is _CLASS:
        del held[name]
    else:
        held[name] = before
