"""The steps of a Lightning module, compiled: what ``AmpPrecision`` puts in their place, and takes away again."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..capture import dynamo, settings
from ..capture.frames import unwatched
from ..common.errors import AmpWarning, ArgumentError
from ..common.messages import users_frame
from ..compile import amp_compile
from ..ir.nesting import compiled_policy
from ..module import AmpMethod
from ..runtime.arguments import check_request
from ..runtime.methods import STEPS
from ..runtime.regions import suspended
from .methods import InPlaceMethod, replaced

#: methods that steps call and that are no part of a model
_OF_MODULE = (
    "log", "log_dict", "print", "manual_backward", "optimizers", "lr_schedulers", "clip_gradients", "toggle_optimizer",
    "untoggle_optimizer", "all_gather",
)  # fmt: skip
_OF_OPTIMIZER = ("step", "zero_grad")
_OF_METRIC = ("forward", "update", "compute", "reset")
_PATIENCE = 6  # calls in which a step may be captured
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
        self._options = options
        self._made: dict[str, tuple[Any, Callable[..., Any]]] = {}
        self._outside: dict[int, tuple[Any, dict[str, Callable[..., Any]]]] = {}
        self._metrics: list[nn.Module] = []
        self._installed: list[InPlaceMethod] = []
        self._marked: list[str] = []  # by Fabric's mark_forward_method

    def begin(self) -> None:
        """Look at the module, which may have changed since the last run."""
        torchmetrics = sys.modules.get("torchmetrics")
        kinds = () if torchmetrics is None else (torchmetrics.Metric, torchmetrics.MetricCollection)
        self._metrics = [module for module in self.module.modules() if isinstance(module, kinds)]

    @property
    def is_automatic(self) -> bool:
        """False if the training step itself calls the optimizers."""
        return bool(getattr(self.module, "automatic_optimization", True))

    @contextlib.contextmanager
    def replaced(self, name: str) -> Iterator[None]:
        """Replace one step by its compiled form, for as long as the trainer calls it."""
        methods = {name: self._step(name)}
        if self.module._compiler_ctx is not None:  # torch.compile has replaced its methods
            methods["forward"] = self.module._compiler_ctx["original_forward"]
        with replaced(self.module, methods), self._surroundings():
            yield

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Keep out of the graphs what steps call and is no part of a model."""
        with contextlib.ExitStack() as stack:
            for owner, names in self._owners():
                known = self._outside.get(id(owner))
                if known is None or known[0] is not owner:
                    found = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
                    if names is _OF_OPTIMIZER:
                        found["step"] = self._with_closure(found["step"])
                    known = self._outside[id(owner)] = owner, {name: _outside(m) for name, m in found.items()}
                stack.enter_context(replaced(owner, known[1]))
            yield

    def _owners(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """The objects with such methods, and the names of the methods."""
        if self._is_lightnings:
            yield self.module, _OF_MODULE
        if not self.is_automatic and self.module._trainer is not None:
            yield from ((optimizer, _OF_OPTIMIZER) for optimizer in self.module.trainer.strategy._lightning_optimizers)
        yield from ((metric, _OF_METRIC) for metric in self._metrics)

    def install(self) -> None:
        """Replace the forward and the steps of the module until ``remove``."""
        self.remove()
        for name in ("forward", *(STEPS if self._is_lightnings else ()), *self._marked):
            self._install(name)

    def mark(self, name: str) -> None:
        """Replace one more method of the module, too."""
        if not any(method.name == name for method in self._installed):
            self._marked.append(name)
            self._install(name)

    def _install(self, name: str) -> None:
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
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._surroundings():
                return self._step(name, method)(*args, **kwargs)

        apart = torch.compiler.disable(call, reason=_REASON)

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() and dynamo.is_ours():
                return method(*args, **kwargs)  # a step that is being captured calls it
            return apart(*args, **kwargs)

        return run

    def _step(self, name: str, method: Any = None) -> Callable[..., Any]:
        """Return what runs instead of a method of the module."""
        method = method or _own_method(self.module, name)
        known = self._made.get(name)
        if known is not None and known[0] == method:
            return known[1]
        run = self._compile(name, method)
        self._made[name] = method, run
        return run

    def _compile(self, name: str, method: Any) -> Callable[..., Any]:
        compiled: Any = amp_compile(method, **self._options)
        self.compiled[name] = target = compiled
        grown = 0

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal grown, target
            known = len(compiled.graphs)
            with settings.varying_numbers():
                result = target(*args, **kwargs)
            grown += target is compiled and len(compiled.graphs) > known
            if grown == _PATIENCE and target is compiled:
                target = self._piecewise(name, method)
            return result

        return run

    def _piecewise(self, name: str, method: Any) -> Callable[..., Any]:
        """Return a method that runs as plain Python, with its products in low precision; what it calls is captured."""
        warnings.warn(
            f"amp_compiler: {name} was captured anew in {_PATIENCE} calls, because something that it reads changes "
            "with every call: a number that Python computes (math.exp(self.global_step)), or a list that it appends "
            "to. From now on the modules that it calls are captured one by one; its own code runs as plain Python, "
            "with its products in low precision.",
            AmpWarning,
            stacklevel=users_frame(),
        )
        function = method.__func__
        if not self.compiled[name].policy.rewrites or not isinstance(function, types.FunctionType):
            return method  # type: ignore[no-any-return]
        plain = types.MethodType(dynamo.not_captured(function), self.module)
        compiled: Any = amp_compile(plain, **self._options)
        self.compiled[name] = compiled
        return compiled  # type: ignore[no-any-return]

    def _with_closure(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step of an optimizer, which calls a closure of the training step's in low precision."""

        @functools.wraps(step)
        def run(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if closure is None:
                return step(**kwargs)
            if "closure" not in self.compiled:
                closures: Any = amp_compile(types.MethodType(_call, self.module), **self._options)
                self.compiled["closure"] = closures
                # the step itself may have nothing to capture then, of which it need not warn
                self.compiled["training_step"]._state.warned.add("nothing")
            return step(closure=functools.partial(self.compiled["closure"], closure), **kwargs)

        return run


def follow_marks() -> None:
    """Have Fabric tell the plugin which methods are marked as forward methods: it tells nobody (Lightning 2.6).

    Its class of wrapped modules is changed once per process, and does nothing else for other plugins.
    """
    for package in ("lightning.fabric", "lightning_fabric"):
        wrapper: Any = getattr(sys.modules.get(f"{package}.wrappers"), "_FabricModule", None)
        mark = getattr(wrapper, "mark_forward_method", None)
        if mark is None or hasattr(mark, "__wrapped__"):
            continue

        @functools.wraps(mark)
        def mark_forward_method(self: Any, method: Any, *, _mark: Callable[..., None] = mark) -> None:
            _mark(self, method)
            tell = getattr(self._strategy.precision, "compile_marked", None)
            if tell is not None:
                tell(self._original_module, method if isinstance(method, str) else method.__name__)

        wrapper.mark_forward_method = mark_forward_method


def _call(self: nn.Module, closure: Callable[[], Any]) -> Any:
    return closure()


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ends a graph, and that runs as if no step were being captured."""

    @functools.wraps(function)
    @unwatched
    def run(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            return function(*args, **kwargs)

    return torch.compiler.disable(run, reason=_REASON)  # type: ignore[no-any-return]


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
