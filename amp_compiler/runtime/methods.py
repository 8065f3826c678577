"""Methods of a model, called through its compiled form: ``fast.generate(...)`` runs the compiled forward.

A method finds the model as ``self`` and calls it. It gets a *stand-in* instead: an object of a subclass of the model's
own class, with the very same ``__dict__``, whose calls go to the compiled model. What the method reads and writes are
the model's attributes; the model itself is never changed, so that other threads may use it at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

#: methods by which Lightning enters a model
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def stand_in(model: nn.Module, compiled: Callable[..., Any]) -> nn.Module:
    """An object that is ``model`` in all but its calls, which go to ``compiled``."""
    own: Any = type(model)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    @functools.wraps(own.forward)  # libraries read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        return model.__reduce_ex__(protocol)  # a copy is a copy of the model

    # __class__: methods ask isinstance(other, self.__class__)
    body = {"__call__": call, "forward": forward, "__reduce_ex__": reduce, "__module__": own.__module__,
            "__qualname__": own.__qualname__, "__doc__": own.__doc__,
            "__class__": property(lambda self: own)}  # fmt: skip
    made: Any = object.__new__(type(own)(own.__name__, (own,), body))
    made.__dict__ = model.__dict__
    return made  # type: ignore[no-any-return]


def calling(method: Any, other: nn.Module, compiled: Any) -> Callable[..., Any]:
    """A bound method with ``other``, a stand-in, in the place of its object; one that returns its object returns
    ``compiled``. A step that bypasses the compiled forward is told of, once."""
    function = method.__func__

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(other, *args, **kwargs)
        if function.__name__ in STEPS and compiled.enabled and not compiled.graphs:
            compiled._state.leave(
                f"{function.__name__} ran and did not call the model itself, as self(batch) does, so nothing was "
                "compiled: parts that it calls, as self.net(batch) does, run in the precision they have. Compile the "
                "part: model.net = amp_compile(model.net)"
            )
        return compiled if result is other else result

    return run
