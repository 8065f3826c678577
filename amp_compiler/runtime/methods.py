"""Methods of a model that are called through its compiled form: ``fast.generate(...)`` runs the compiled forward.

A method expects the model as ``self`` and calls it. It gets a *stand-in* instead: an object of a subclass of the
model's own class, with the same ``__dict__``, whose calls go to the compiled model. The method reads and writes the
model's attributes; the model itself is never changed, so other threads may use it at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

#: the methods of a model that Lightning calls
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def stand_in(model: nn.Module, compiled: Callable[..., Any]) -> nn.Module:
    """Return an object that behaves like ``model``, except that its calls go to ``compiled``."""
    own: Any = type(model)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    @functools.wraps(own.forward)  # libraries read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        return model.__reduce_ex__(protocol)  # a copy is a copy of the model

    # __class__: for methods that test isinstance(other, self.__class__)
    body = {"__call__": call, "forward": forward, "__reduce_ex__": reduce, "__module__": own.__module__,
            "__qualname__": own.__qualname__, "__doc__": own.__doc__,
            "__class__": property(lambda self: own)}  # fmt: skip
    made: Any = object.__new__(type(own)(own.__name__, (own,), body))
    made.__dict__ = model.__dict__
    return made  # type: ignore[no-any-return]


def calling(method: Any, other: nn.Module, compiled: Any) -> Callable[..., Any]:
    """Return a bound method with ``other``, a stand-in, instead of its object; where it returns its object, it returns
    ``compiled``. Warns, once, about a step that bypasses the compiled forward."""
    function = method.__func__

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(other, *args, **kwargs)
        if function.__name__ in STEPS and compiled.enabled and not compiled.graphs:
            compiled._state.leave(
                f"{function.__name__} did not call the model itself, as self(batch) does, so nothing was compiled: "
                "parts that it calls, as self.net(batch) does, run in their own precision. Compile the part instead: "
                "model.net = amp_compile(model.net)"
            )
        return compiled if result is other else result

    return run
