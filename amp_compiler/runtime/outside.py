"""Code that Dynamo does not capture, which runs outside of any graph, and the modules that it calls.

Modules that such code calls are compiled one by one. The rest runs as plain Python, in which each matrix product and
convolution runs under ``torch.autocast`` by itself and its result is converted back to fp32: the code around it sees
the dtypes that it would see without us, so nothing fails because of dtypes. ``Policy.torch`` promises autocast's own
numerics instead: there all of such code runs under ``torch.autocast``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from ..capture import dynamo, frames, wrappers
from ..common.torch_names import ConvNd, dispatch_mode
from ..ir.nesting import compiled_policy
from ..policy import Policy
from ..policy.scopes import ATTRIBUTE, original_of, paths_of
from .backend import Backend
from .options import Options
from .products import PlainProducts
from .regions import HERE, NOTHING, Autocast, LowProducts, inside
from .state import State

#: layers of torch.nn that multiply matrices or convolve; compiling others by themselves gains nothing
_LAYERS = (
    nn.Linear, nn.Bilinear, ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention,
    nn.Transformer,
)  # fmt: skip

frames.belongs_to_us(__file__)


@dataclass
class _Layer:
    """A module that uncaptured code calls. ``run`` is None if the module is not compiled by itself."""

    module: weakref.ref[nn.Module]
    path: str
    run: Callable[..., Any] | None
    forward: Callable[..., Any] | None = None  # of a module that is or holds a unit of fully_shard, compiled


class Uncaptured:
    """Runs all code of one compiled model that is not captured (``capture.trampolines.Outside``)."""

    def __init__(self, target: Any, options: Options, state: State, backend: Backend) -> None:
        self.target, self.options, self.state, self.backend = target, options, state, backend
        self.policy: Policy = options.policy
        self._layers: dict[int, _Layer] = {}
        self._paths: dict[int, str] = {}
        self._forwards: set[CodeType] = set()
        self._products = PlainProducts(self.policy, state)
        self._around = self._products.around
        self.watches_disabled = self.over_limit = self.leaves_code = False
        self._dynamic = options.dynamic
        self._units = wrappers.has_units(target)
        self._wholly = self.policy.autocast_device if not options.keep_output_dtypes else None
        self.under_autocast = self._wholly is not None

    def follow(self, options: Options, state: State) -> None:
        """Go on by the policy of other options."""
        self.options, self.state, self.policy = options, state, options.policy
        self._products = PlainProducts(self.policy, state)
        self._around = self._products.around

    def begin(self) -> None:
        """Prepare a call of the compiled model."""
        if self.leaves_code:
            frames.watch_calls(self.watches_disabled)

    def call(self) -> AbstractContextManager[None]:
        """Return the context manager for each call of the compiled model."""
        return NOTHING if self._wholly is None else self._one_autocast()

    @contextmanager
    def _one_autocast(self) -> Iterator[None]:
        # As under one torch.autocast around the model, a weight that is used twice is cast once.
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def make_dynamic(self) -> None:
        """Compile modules with dynamic sizes from now on."""
        self._dynamic, self.over_limit = True, False
        self._layers.clear()

    # ------------------------------------------------------------------------------ trampolines.Outside

    def is_plain(self) -> bool:
        return HERE.region is not None

    def plain(self, call: Callable[[], Any]) -> Any:
        with inside(self._region()):
            return call()

    def raises(self, code: CodeType) -> None:
        place = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        self.state.leave(
            f"an op raises an exception while it is traced, in {place} or in what that calls, so this code runs as "
            "plain Python, with its products under torch.autocast. A check before the op keeps it in a graph"
        )

    def captured(self, call: Callable[[], Any]) -> Any:
        if isinstance(HERE.region, Autocast) and self._products.users_autocast():
            return call()  # autocast stays as the model's own code has set it
        with inside(None):
            return call()

    def module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        layer = self._layer(module)
        if layer is None:
            return self._as_it_is(module, call)
        forced = original_of(module).__dict__.get(ATTRIBUTE)
        if forced is None and (rule := self.policy.module_rule(layer.path)) is not None:
            forced = rule[1]
        outer = self._around.dtype, self._around.path
        self._around.path = layer.path
        if forced is not None:
            self._around.dtype = forced
        try:
            if layer.run is not None and dispatch_mode() is None:
                return self._compiled(layer, module, args, kwargs, call)
            return self._as_it_is(module, call)
        finally:
            self._around.dtype, self._around.path = outer

    def _compiled(
        self, layer: _Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:
        assert layer.run is not None
        running = self.state.running
        before, running.inherited = running.inherited, (layer.path, self._around.dtype)
        inside, running.inside = running.inside, None
        try:
            return self.captured(lambda: layer.run(*args, **kwargs) if layer.run is not None else None)
        except Exception as error:
            if not dynamo.is_capture_failure(error):
                raise
        finally:
            running.inherited, running.inside = before, inside
        if compiled_policy(module) is not None:
            path = layer.path
            self.state.note(f"{path} was compiled by itself and is not in these graphs: see its own report()")
        result = self._as_it_is(module, call)  # nothing of it has run yet
        layer.run = None  # the call itself succeeded, so the module cannot be captured
        return result

    def is_forward(self, code: CodeType) -> bool:
        return code in self._forwards

    def forward(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:
        module = args[0] if args else None
        if not isinstance(module, nn.Module) or not self._runs_by_forward(module):
            return self.captured(call)
        layer = self._layer(module)
        if layer is None:
            return self.captured(call)
        if layer.forward is None:
            layer.forward = dynamo.compile_frame(
                dynamo.with_code_of_users(function), self.backend, dynamic=self._dynamic, fullgraph=False, outside=self
            )
        running = self.state.running
        before = running.inherited, running.inside
        if layer.path:
            running.inherited = (layer.path, self._around.dtype)
            running.inside = (layer.path, type(module))
        try:
            return self.captured(lambda: layer.forward(*args, **kwargs) if layer.forward is not None else None)
        finally:
            running.inherited, running.inside = before

    def _runs_by_forward(self, module: nn.Module) -> bool:
        return self._units and wrappers.has_units(module)

    def _as_it_is(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        if self._runs_by_forward(module) and (code := frames.watch_forward(module)) is not None:
            self._forwards.add(code)
            return self.captured(call)
        if frames.forward_is_library(module) or frames.is_disabled(module):
            return self.plain(call)
        frames.look_at_forward(module)
        return self.captured(call)

    def _region(self) -> LowProducts | Autocast | None:
        if self._wholly is None:
            return HERE.region if isinstance(HERE.region, LowProducts) else LowProducts(self._products)
        low = self._products.low_here()
        if isinstance(HERE.region, Autocast) and (self._products.users_autocast() or HERE.region.dtype is low):
            return HERE.region
        return None if low is None or self._products.users_autocast() else Autocast(self._wholly, low)

    # ---------------------------------------------------------------------------------------- modules

    def _layer(self, module: nn.Module) -> _Layer | None:
        """Return the record of a module; None if it isn't part of the model, such as one that its forward creates."""
        known = self._layers.get(id(module))
        if known is not None and known.module() is module:
            return known
        if id(module) not in self._paths:
            self._paths = paths_of(self.target)
        path = self._paths.get(id(module))
        if path is None:
            return None
        run = None
        if path and not self._runs_by_forward(module) and (self._units or _is_worth_it(module)):
            run = dynamo.compile_frame(
                module, self.backend, dynamic=self._dynamic, fullgraph=False, error_on_graph_break=True
            )
        self._layers[id(module)] = _Layer(weakref.ref(module), path, run)
        return self._layers[id(module)]


def _is_worth_it(module: nn.Module) -> bool:
    """True if a module should be compiled by itself: it computes something, and may multiply matrices or convolve."""
    name = type(module).__module__
    if name.startswith(("torch.nn.parallel", "torch.distributed")) or isinstance(module, torch.jit.ScriptModule):
        return False
    if not name.startswith("torch.nn.") or type(module).forward is nn.Module.forward:
        return True
    return any(isinstance(m, _LAYERS) or not type(m).__module__.startswith("torch.nn.") for m in module.modules())
