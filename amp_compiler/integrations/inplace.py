"""The forward of a model, replaced in place by its compiled form, and put back.

Trainers hand the model itself to callbacks, wrap it in DDP, save it and call its other methods. So it has to stay the
same object, and only the attribute ``forward`` changes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from typing import Any

from torch import nn

from ..common.errors import ArgumentError
from ..compile import amp_compile
from ..module import AmpModule


class InPlaceForward:
    """Stands in for ``model.forward``: calls run in mixed precision. Making one doesn't change the model.

    A copy or a pickle of the model is a plain one: its forward is the model's own.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if isinstance(model, AmpModule) or isinstance(model.__dict__.get("forward"), InPlaceForward):
            raise ArgumentError("This model is compiled already: pass the original, compiled.original.")
        self.model, self.options = model, options
        self._own = model.forward
        self._before = model.__dict__.get("forward", self)  # self: the class's forward
        self.__signature__ = inspect.signature(self._own)
        self.__doc__ = self._own.__doc__
        self.compiled = amp_compile(_bound(model), **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    @property
    def fits(self) -> bool:
        """False if the model has got another forward since."""
        current = self.model.forward
        return current is self or current == self._own

    def install(self) -> None:
        """Make this the model's forward."""
        self.model.__dict__["forward"] = self

    def remove(self) -> None:
        """Give the model its own forward back, unless something else has replaced it since."""
        held = self.model.__dict__
        if held.get("forward") is not self:
            return
        if self._before is self:
            del held["forward"]
        else:
            held["forward"] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self.model))
        if twin is None or self._before is not self:
            return copy.deepcopy(self._own, memo)
        return types.MethodType(type(twin).forward, twin)

    def __reduce__(self) -> tuple[Any, ...]:
        # while a model is unpickled it has no attributes yet, so that this finds the forward of its class
        return (getattr, (self.model, "forward")) if self._before is self else (_same, (self._before,))


def _same(value: Any) -> Any:
    return value


def installed(model: nn.Module) -> InPlaceForward | None:
    """Return what replaces the forward of ``model`` now, if anything does."""
    found = model.__dict__.get("forward")
    return found if isinstance(found, InPlaceForward) else None


def _bound(model: nn.Module) -> Any:
    """Return the model's forward as a method of it, by which ``amp_compile`` knows the paths of its modules."""
    own = model.forward
    if getattr(own, "__self__", None) is model:
        return own

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return types.MethodType(forward, model)
