"""The forward of a model, replaced in place by its compiled form, and put back.

Accelerate and Transformers hand the model itself to callbacks, wrap it in DDP, save it and call its other methods. So
it stays the same object, and only its attribute ``forward`` changes.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

from ..common.errors import ArgumentError
from ..compile import amp_compile
from ..module import AmpModule
from .methods import InPlaceMethod


class InPlaceForward(InPlaceMethod):
    """Stands in for ``model.forward``: calls run in mixed precision. Making one doesn't change the model.

    ``options``: the arguments of ``amp_compile``.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if isinstance(model, AmpModule) or installed(model) is not None:
            raise ArgumentError("This model is compiled already: pass the original, compiled.original.")
        self.options = options
        compiled = amp_compile(_bound(model), **options)
        self.compiled: AmpModule = compiled._compiled
        super().__init__(model, "forward", compiled)

    @property
    def fits(self) -> bool:
        """False if the model was given another forward since."""
        current = self.module.forward
        return current is self or current == self.__wrapped__


def installed(model: nn.Module) -> InPlaceForward | None:
    """Return what stands in for the forward of ``model`` now, if anything does."""
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
