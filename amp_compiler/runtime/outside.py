"""What runs outside of any graph: code that Dynamo does not capture, and the modules that it calls.

Modules that such code calls are compiled one by one. What is left runs as plain Python, and each matrix product and
convolution in it runs under ``torch.autocast`` by itself, with the result brought back to fp32: the code around it sees
the dtypes that it would see without us, so that nothing fails for its dtypes. ``Policy.torch`` promises autocast's own
numerics instead: there the whole of such code runs under ``torch.autocast``.
"""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..capture import dynamo, frames
from ..ir import LOW_DTYPES
from ..ir.flops import PRODUCTS
from ..ir.nesting import compiled_policy
from ..policy import Policy
from ..policy.ops.names import FUNCTION_NAMES
from ..policy.ops.row import OpClass
from ..policy.scopes import ATTRIBUTE, Surroundings, original_of, paths_of

if TYPE_CHECKING:
    from .backend import Backend, Options, State

#: layers of torch.nn that multiply matrices or convolve; the others gain nothing from being compiled alone
_LAYERS = (
    nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention,
    nn.Transformer,
)  # fmt: skip
#: RNNs have no kernel of autocast's on every device: one that cannot be compiled stays in fp32
_NOT_ALONE = ("lstm", "gru", "rnn_tanh", "rnn_relu")


# ------------------------------------------------------------------------------------------------- regions


class _Here(threading.local):
    """What this thread is in."""

    region: _LowProducts | _Autocast | None = None


_HERE = _Here()
frames.belongs_to_us(__file__)


class _LowProducts(TorchFunctionMode):
    """Products run under autocast one by one, and give fp32 back."""

    def __init__(self, outside: Uncaptured) -> None:
        super().__init__()
        self.outside = outside

    def enter(self, above: int = 0) -> None:
        """Take effect beneath the ``above`` uppermost modes, which the user's code has opened."""
        others = [torch._C._pop_torch_function_stack() for _ in range(above)]
        torch._C._push_on_torch_function_stack(self)
        for mode in reversed(others):
            torch._C._push_on_torch_function_stack(mode)

    def leave(self) -> int:
        """End it; returns how many modes of the user's were above."""
        others = []
        while (mode := torch._C._pop_torch_function_stack()) is not self:
            others.append(mode)
        for mode in reversed(others):
            torch._C._push_on_torch_function_stack(mode)
        return len(others)

    @frames.unwatched
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        low = self.outside.low_for(func)
        if low is None:
            result = func(*args, **kwargs)
            self.outside.note_wide(func, (args, kwargs), result)
            if self.outside.is_in_place_product(func, result):
                self.outside.stays_wide(func, "it writes in place")
            return result
        floats = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        if not floats or any(t.dtype is not torch.float32 for t in floats):
            return func(*args, **kwargs)
        if "out" not in kwargs and func.__name__ not in _NOT_ALONE and not frames.watches_saved_tensors():
            try:
                with torch.autocast(floats[0].device.type, dtype=low):
                    result = func(*args, **kwargs)
            except (RuntimeError, ValueError):  # no kernel in this dtype; if the call is wrong, it says so again
                pass
            else:
                if any(isinstance(t, Tensor) and t.dtype in LOW_DTYPES for t in pytree.tree_leaves(result)):
                    return pytree.tree_map_only(Tensor, _as_fp32, result)
                self.outside.stays_wide(func)
                return result
        result = func(*args, **kwargs)
        again = "torch.utils.checkpoint computes it again in the backward, outside of this call"
        self.outside.stays_wide(func, again if frames.watches_saved_tensors() else "")
        return result


def _as_fp32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in LOW_DTYPES else value


class _Autocast:
    """All of the code runs under ``torch.autocast``. No context manager of torch's: one more would look like a region
    that the model's code has opened."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.before: tuple[bool, torch.dtype] = (False, dtype)

    def enter(self, above: int = 0) -> None:
        self.before = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)
        torch.set_autocast_enabled(self.device, True)
        torch.set_autocast_dtype(self.device, self.dtype)

    def leave(self) -> int:
        enabled, dtype = self.before
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        return 0


@contextmanager
def _inside(region: _LowProducts | _Autocast | None) -> Iterator[None]:
    """Change what this thread is in, and change it back."""
    before = _HERE.region
    if before is region:
        yield
        return
    above = before.leave() if before is not None else 0
    if region is not None:
        region.enter()
    _HERE.region = region
    try:
        yield
    finally:
        if region is not None:
            region.leave()
        if before is not None:
            before.enter(above)
        _HERE.region = before


def suspended() -> AbstractContextManager[None]:
    """A compiled model is called, perhaps by the uncaptured code of another one, whose region ends here."""
    return _NOTHING if _HERE.region is None else _inside(None)


_NOTHING = nullcontext()


# ------------------------------------------------------------------------------------------------- modules


@dataclass
class _Layer:
    """A module that uncaptured code calls. ``run`` is None where the module is not compiled by itself."""

    module: weakref.ref[nn.Module]
    path: str
    run: Callable[..., Any] | None


class Uncaptured:
    """In charge of all code of one compiled model that is not captured (``capture.trampolines.Outside``)."""

    def __init__(self, target: Any, options: Options, state: State, backend: Backend) -> None:
        self.target, self.options, self.state, self.backend = target, options, state, backend
        self.policy: Policy = options.policy
        self._layers: dict[int, _Layer] = {}
        self._paths: dict[int, str] = {}
        self._lowers: dict[Any, bool] = {}
        self._wide_makers: dict[Any, bool] = {}
        self._notes_wide = self.policy.keeps_wide
        self._told: set[Any] = set()
        self._around = _Around()
        self.watches_disabled = self.over_limit = False
        self._dynamic = options.dynamic
        self._wholly = self.policy.autocast_device if not options.keep_output_dtypes else None
        self.under_autocast = self._wholly is not None

    def call(self) -> AbstractContextManager[None]:
        """Around each call of the compiled model."""
        frames.watch_calls(self.watches_disabled)
        return _NOTHING if self._wholly is None else self._one_autocast()

    @contextmanager
    def _one_autocast(self) -> Iterator[None]:
        # As under one torch.autocast around the model, the low copy of a weight that is used twice is made once.
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

    # ---------------------------------------------------------------------------------- trampolines.Outside

    def is_plain(self) -> bool:
        return _HERE.region is not None

    def plain(self, call: Callable[[], Any]) -> Any:
        with _inside(self._region()):
            return call()

    def raises(self, code: CodeType) -> None:
        place = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        self.state.leave(
            f"an op raises an exception while it is traced, in {place} or in what that calls, so that this code runs "
            "as plain Python, with its products under torch.autocast. A check before the op keeps it in a graph"
        )

    def captured(self, call: Callable[[], Any]) -> Any:
        if isinstance(_HERE.region, _Autocast) and self._users_autocast():
            return call()  # autocast is as the model's own code has set it
        with _inside(None):
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
            if layer.run is not None and torch.utils._python_dispatch._get_current_dispatch_mode() is None:
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
        try:
            return self.captured(lambda: layer.run(*args, **kwargs) if layer.run is not None else None)
        except Exception as error:
            if not dynamo.is_capture_failure(error):
                raise
        finally:
            running.inherited = before
        if compiled_policy(module) is not None:
            path = layer.path
            self.state.note(f"{path} was amp_compile'd by itself and is not in these graphs: see its own report()")
        result = self._as_it_is(module, call)  # nothing of it has run yet
        layer.run = None  # the call itself was right, so the module cannot be captured
        return result

    def _as_it_is(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        if frames.forward_is_library(module) or frames.is_disabled(module):
            return self.plain(call)
        frames.look_at_forward(module)
        return self.captured(call)

    # -------------------------------------------------------------------------------------- precision

    def _region(self) -> _LowProducts | _Autocast | None:
        if self._wholly is None:
            return _HERE.region if isinstance(_HERE.region, _LowProducts) else _LowProducts(self)
        low = self._low_here()
        if isinstance(_HERE.region, _Autocast) and (self._users_autocast() or _HERE.region.dtype is low):
            return _HERE.region
        return None if low is None or self._users_autocast() else _Autocast(self._wholly, low)

    def low_for(self, function: Any) -> torch.dtype | None:
        """The dtype that a product of plain code is to run in; None for what is no product, or is to be left alone."""
        if not self._is_low(function) or self._users_autocast():
            return None
        return self._low_here()

    def _low_here(self) -> torch.dtype | None:
        region = self.state.running.entered.region_since()
        dtype = self.policy.low
        if region is not None and region[0] == "precision":
            dtype = region[1] or torch.float32
        elif self._around.dtype is not None:
            dtype = self._around.dtype
        return dtype if dtype in LOW_DTYPES else None

    def _users_autocast(self) -> bool:
        """Whether the model's code has opened a ``torch.autocast`` region of its own."""
        return Surroundings.now().autocasts > self.state.running.entered.autocasts

    def _is_low(self, function: Any) -> bool:
        known = self._lowers.get(function)
        if known is None:
            name = _op_name(function)
            known = name in PRODUCTS and self.policy.classify(name).cls is OpClass.LOW
            self._lowers[function] = known
        return known

    def note_wide(self, function: Any, given: Any, result: Any) -> None:
        """Remember results that are wide (``wide.py``), for the graphs that read them: plain code runs in fp32, and a
        graph that takes its results for low ones would round them."""
        if not self._notes_wide:
            return
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.dtype is torch.float32]
        if not made:
            return
        handed = self.state.handed
        why = next((why for t in pytree.tree_leaves(given) if isinstance(t, Tensor) and (why := handed.why(t))), "")
        if not why and self._makes_wide(function):
            why = f"the fp32 result of {_op_name(function)}, in code that is not captured"
        for value in made if why else ():
            handed.add(value, why)

    def _makes_wide(self, function: Any) -> bool:
        known = self._wide_makers.get(function)
        if known is None:
            choice = self.policy.classify(_op_name(function))
            known = choice.cls is OpClass.FP32 and not (choice.row is not None and choice.row.fp32_inside)
            self._wide_makers[function] = known
        return known

    def is_in_place_product(self, function: Any, result: Any) -> bool:
        """True for ``addmm_`` in fp32, which autocast leaves alone."""
        name = str(getattr(function, "__name__", ""))
        if not name.endswith("_") or name.endswith("__") or name.removesuffix("_") not in PRODUCTS:
            return False
        return isinstance(result, Tensor) and result.dtype is torch.float32 and self._low_here() is not None

    def stays_wide(self, function: Any, why: str = "") -> None:
        """A product of plain code ran in fp32: say so, once for each place."""
        frame: Any = sys._getframe(1)
        inside = ("amp_compiler", "torch.", "contextlib", "functools")
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
            frame = frame.f_back
        place = function, frame.f_code, frame.f_lineno
        if place not in self._told:
            self._told.add(place)
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self.state.leave(
                f"{function.__name__} runs in float32, because it is in code that is not captured and "
                f"{why or 'torch.autocast does not make it low'}: in {self._around.path or 'the model'}, "
                f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}: {line}"
            )

    # ---------------------------------------------------------------------------------------- modules

    def _layer(self, module: nn.Module) -> _Layer | None:
        """None for a module that is not the model's, such as one that its forward makes."""
        known = self._layers.get(id(module))
        if known is not None and known.module() is module:
            return known
        if id(module) not in self._paths:
            self._paths = paths_of(self.target)
        path = self._paths.get(id(module))
        if path is None:
            return None
        run = None
        if path and _is_worth_it(module):
            run = dynamo.compile_frame(
                module, self.backend, dynamic=self._dynamic, fullgraph=False, error_on_graph_break=True
            )
        self._layers[id(module)] = _Layer(weakref.ref(module), path, run)
        return self._layers[id(module)]


def _op_name(function: Any) -> str:
    """The name of the op that a function of torch, or a method of its tensors, runs."""
    name = str(getattr(function, "__name__", ""))
    if name in FUNCTION_NAMES:
        return FUNCTION_NAMES[name]
    if name.startswith("__") and name.endswith("__"):  # __pow__, __rpow__, __rmatmul__
        plain = name.strip("_")
        return {"rmatmul": "matmul", "rpow": "pow"}.get(plain, plain)
    return name


class _Around(threading.local):
    """The module around plain code, and the precision that it has been given."""

    path: str = ""
    dtype: torch.dtype | None = None


def _is_worth_it(module: nn.Module) -> bool:
    """Whether to compile a module by itself: it computes something, and may multiply matrices or convolve."""
    name = type(module).__module__
    if name.startswith(("torch.nn.parallel", "torch.distributed")) or isinstance(module, torch.jit.ScriptModule):
        return False
    if not name.startswith("torch.nn.") or type(module).forward is nn.Module.forward:
        return True
    return any(isinstance(m, _LAYERS) or not type(m).__module__.startswith("torch.nn.") for m in module.modules())
