"""The steps of a Lightning module, compiled: what ``AmpPrecision`` puts in their place, and takes away again."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..capture import dynamo
from ..capture.frames import unwatched
from ..common.errors import ArgumentError
from ..compile import amp_compile
from ..ir.nesting import compiled_policy
from ..module import AmpMethod
from ..runtime.arguments import check_request
from ..runtime.methods import STEPS
from .methods import InPlaceMethod, replaced

#: methods of a LightningModule that steps call and that are no part of a model
_OUTSIDE = (
    "log", "log_dict", "print", "manual_backward", "optimizers", "lr_schedulers", "clip_gradients", "toggle_optimizer",
    "untoggle_optimizer", "all_gather",
)  # fmt: skip
_REASON = "Lightning's own methods run outside of the graphs"
_NO_REQUEST = ("dynamic", "keep_output_dtypes")  # options of amp_compile that have nothing to do with the policy


class ModuleSteps:
    """The steps of one module and, with Fabric, its forward. Each is compiled when it is called first.

    Making one doesn't change the module. ``options``: those of ``amp_compile``.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        for name in ("", "forward", *STEPS):
            if compiled_policy(module.__dict__.get(name) if name else module) is not None:
                what = f"The method {name} of this module" if name else "This module"
                raise ArgumentError(
                    f"{what} was already compiled by amp_compile, and AmpPrecision compiles all steps of a module: "
                    "pass the original (compiled.original)."
                )
        check_request(**{k: v for k, v in options.items() if k not in _NO_REQUEST}).policy_for(module)
        self.module: Any = module
        self.compiled: dict[str, AmpMethod] = {}
        self._is_lightnings = hasattr(module, "automatic_optimization")
        metric = getattr(sys.modules.get("torchmetrics"), "Metric", None)
        holds = metric is not None and any(isinstance(m, metric) for m in module.modules())
        self._options = {**options, "exclude": [*options["exclude"], metric]} if holds else options
        self._outside = {
            name: torch.compiler.disable(unwatched(getattr(module, name)), reason=_REASON)
            for name in _OUTSIDE if self._is_lightnings and hasattr(module, name)
        }  # fmt: skip
        self._made: dict[tuple[str, bool], tuple[Any, Callable[..., Any]]] = {}
        self._installed: list[InPlaceMethod] = []

    @property
    def is_automatic(self) -> bool:
        """False if the training step itself calls the optimizers."""
        return bool(getattr(self.module, "automatic_optimization", True))

    @contextlib.contextmanager
    def replaced(self, name: str) -> Iterator[None]:
        """Replace one step by its compiled form, for as long as the trainer calls it."""
        methods = {**self._outside, name: self._step(name)}
        if self.module._compiler_ctx is not None:  # torch.compile has replaced its methods
            methods["forward"] = self.module._compiler_ctx["original_forward"]
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self.module, methods))
            if not self.is_automatic:
                for optimizer in self.module.trainer.strategy._lightning_optimizers:
                    stack.enter_context(replaced(optimizer, {"step": unwatched(optimizer.step)}))
            yield

    def install(self) -> None:
        """Replace the forward and the steps of the module until ``remove``."""
        self.remove()
        for name in ("forward", *(STEPS if self._is_lightnings else ())):
            if isinstance(other := self.module.__dict__.get(name), InPlaceMethod):
                other.remove()  # of another plugin, which the module was given to before
            method = InPlaceMethod(self.module, name, self._in_place(name, _own_method(self.module, name)))
            method.install()
            self._installed.append(method)

    def remove(self) -> None:
        """Put back what ``install`` has replaced."""
        for method in self._installed:
            method.remove()
        self._installed = []

    def _in_place(self, name: str, method: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() and dynamo.is_ours():
                return method(*args, **kwargs)  # a step that is being captured calls it
            with replaced(self.module, self._outside):
                return self._step(name, method)(*args, **kwargs)

        return run

    def _step(self, name: str, method: Any = None) -> Callable[..., Any]:
        """Return what runs instead of a method of the module."""
        method = method or _own_method(self.module, name)
        whole = name != "training_step" or self.is_automatic
        known = self._made.get((name, whole))
        if known is not None and known[0] == method:
            return known[1]
        target = method
        if not whole:
            # Optimizers step in the middle, which no graph must contain: the step runs as plain Python, with its
            # products in low precision, and the modules that it calls are captured one by one.
            target = types.MethodType(torch.compiler.disable(method.__func__, reason=_REASON), self.module)
        compiled: Any = amp_compile(target, **self._options)

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return compiled(*args, **kwargs)

        self.compiled[name] = compiled
        self._made[name, whole] = method, run
        return run


def _own_method(module: nn.Module, name: str) -> Any:
    """Return a method of a module as a bound method, without what ``torch.compile`` has put in its place."""
    context = getattr(module, "_compiler_ctx", None)
    method = getattr(module, name) if context is None else context[f"original_{name}"]
    if getattr(method, "__self__", None) is module:
        return method

    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return types.MethodType(run, module)
