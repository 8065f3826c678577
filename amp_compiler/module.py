"""``AmpModule``: a compiled model, which behaves like the original and runs in mixed precision."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from .capture import dynamo
from .capture.frames import is_optimized
from .common.errors import AmpWarning, ArgumentError
from .common.messages import users_frame
from .common.torch_names import is_jit_tracing
from .inspect.report import Report
from .ir.nesting import mark_of, policy_region
from .policy import Policy, dtype_name
from .policy.scopes import is_inside_call
from .rewrite.records import Record
from .runtime.arguments import call_arguments
from .runtime.captured import Captured
from .runtime.methods import calling, stand_in
from .runtime.options import Options
from .runtime.state import State

#: names that belong to nn.Module itself: the machinery of calls, hooks and state_dict()
_MACHINERY = frozenset({*dir(nn.Module), *nn.Module().__dict__})

_FIRST_CALLS = threading.RLock()


class AmpModule(nn.Module):
    """A compiled model, made by ``amp_compile``. It behaves like the original and runs in mixed precision.

    Parameters, buffers and submodules are the original's own objects, so ``state_dict()`` has the original's keys and
    any optimizer works. ``isinstance`` recognizes the original's class, and ``inspect.signature(fast.forward)`` is the
    original's. ``fast.enabled = False`` runs the original.

    An attribute that is set goes to the first of these that fits:

    1. names of ``nn.Module`` itself (``forward``, hooks, methods) stay on this object;
    2. an attribute that the original has is set there;
    3. new parameters, modules and tensors go to the original, and so does every new public name;
    4. new private names (``_original_forward``), and methods bound to this object, stay on this object.

    Examples:
        >>> import torch
        >>> from amp_compiler import amp_compile
        >>> model = torch.nn.Linear(4, 2)
        >>> fast = amp_compile(model)
        >>> fast.weight is model.weight, isinstance(fast, torch.nn.Linear)
        (True, True)
        >>> fast.enabled = False
        >>> torch.equal(fast(torch.ones(4)), model(torch.ones(4)))
        True
    """

    _amp_compiled = True  # lower layers recognize a compiled module by it: scopes.original_of, nesting
    _OWN = frozenset({"enabled", "training", "_original", "_options", "_state", "_compiled", "_modules", "_parameters",
                      "_buffers", "_non_persistent_buffers_set", "_is_function", "_ready", "_stand_in",
                      "_given_class", "_mark", "__class__"})  # fmt: skip
    _state: Any
    _compiled: Any

    def __new__(cls, target: Callable[..., Any], options: Options) -> AmpModule:
        return super().__new__(_class_for(target) if cls is AmpModule else cls)

    def __init__(self, target: Callable[..., Any], options: Options) -> None:
        is_function = not isinstance(target, nn.Module)
        object.__setattr__(self, "_ready", False)
        super().__init__()
        object.__setattr__(self, "_original", target)
        object.__setattr__(self, "_is_function", is_function)
        object.__setattr__(self, "_options", options)
        object.__setattr__(self, "_state", State())
        object.__setattr__(self, "_compiled", None)
        object.__setattr__(self, "_given_class", type(target))
        object.__setattr__(self, "_mark", mark_of(options.policy))
        object.__setattr__(self, "_stand_in", None)
        object.__setattr__(self, "enabled", True)
        if isinstance(target, nn.Module):
            for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                object.__setattr__(self, name, getattr(target, name))
        object.__setattr__(self, "_ready", True)

    # ------------------------------------------------------------------------------------------- calling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled:
            return self._original(*args, **kwargs)
        if torch.compiler.is_compiling() or is_inside_call():
            return self._traced(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward while something that contains this module is traced."""
        if not torch.compiler.is_compiling() and dynamo.needs_break():
            # the graph breaks inside, so this frame runs as plain Python, in a call of another compiled model
            return dynamo.run_apart(self._call, args, kwargs)  # type: ignore[misc]
        if dynamo.is_ours():
            with policy_region(self._mark):  # a part of a model that is being compiled: see nesting.py
                return self._original(*args, **kwargs)
        if torch.compiler.is_exporting():
            if not torch.compiler.is_dynamo_compiling():
                warn_of_export()
            return self._original(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling() and dynamo.needs_break():
            return dynamo.run_apart(self._call, args, kwargs)  # type: ignore[misc]
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if is_jit_tracing():
            raise ArgumentError(f"torch.jit.trace cannot trace a compiled module: {_NO_TORCHSCRIPT}")
        return (self._compiled or self._begin())(*args, **kwargs)

    def _begin(self, captured: Captured | None = None) -> Captured:
        with _FIRST_CALLS:  # several threads may come at once
            if self._compiled is None:
                found = captured or Captured(self._original, self._original, self._options, self._state)
                self._compiled, self._state = found, found.state
        return self._compiled  # type: ignore[no-any-return]

    def __prepare_scriptable__(self) -> Any:
        """Raise an error: torch.jit.script calls this before it looks at a module."""
        raise ArgumentError(f"torch.jit.script cannot script a compiled module: {_NO_TORCHSCRIPT}")

    # ------------------------------------------------------------------------------------------- looking

    @property
    def original(self) -> Any:
        """The module or function that was compiled; it is not modified."""
        return self._original

    @property
    def policy(self) -> Policy:
        """The ``Policy`` that is used."""
        policy: Policy = self._options.policy
        return policy

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """The rewritten forward graphs, one for each captured piece and each re-compilation."""
        return [piece.graph for piece in self._state.pieces]

    @property
    def history(self) -> list[Record]:
        """Every stage of every graph, as records with ``name``, ``seconds``, ``modified`` and ``text``."""
        return list(self._state.history)

    def report(self, graph: int | None = None, *, inputs: Any = None) -> Report:
        """Report every op of the graphs captured so far, with its precision and the reason for it.

        Args:
            graph: The index of one graph, to report that graph alone.
            inputs: A tensor, a tuple of arguments or a dict of keyword arguments. If given, the model is called once
                more, and ``report().work`` holds the shares of its products and convolutions, by FLOPs, that ran
                ``"captured"``, outside of the graphs under ``"autocast"``, and outside of them in ``"float32"``. A
                warning names the places of the last. Buffers and random generators are restored afterwards; other side
                effects of the model's code happen again.

        Examples:
            >>> from amp_compiler import amp_compile
            >>> fast = amp_compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
            >>> fast.report(inputs=torch.ones(1, 4)).work
            {'captured': 1.0, 'autocast': 0.0, 'float32': 0.0}
        """
        state: State = self._state
        if inputs is not None:
            args, kwargs = call_arguments(inputs)
            state.measure(lambda: self(*args, **kwargs), self._original)
        return state.report(self.policy, graph)

    # ----------------------------------------------------------------------------- behaving as a module

    @property
    def training(self) -> bool:
        """True in training mode, as ``original.training``."""
        return bool(getattr(self._original, "training", False)) if self._ready else True

    @training.setter
    def training(self, mode: bool) -> None:
        if self._ready and not self._is_function:
            self._original.training = mode

    def train(self, mode: bool = True) -> AmpModule:
        if not self._is_function:
            self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_function:
            return super().state_dict(*args, **kwargs)
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_function:
            return super().load_state_dict(*args, **kwargs)
        return self._original.load_state_dict(*args, **kwargs)

    @property
    def __class__(self) -> type:
        """The original's class, for ``isinstance``; ``type()`` returns ``AmpModule``. A wrapper from torch.compile is
        not imitated: code that finds one unwraps it and runs what is inside."""
        original = self.__dict__.get("_original")
        return type(original) if isinstance(original, nn.Module) and not is_optimized(original) else type(self)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        # fully_shard and parametrize replace a module's class by one of their own, with methods and properties
        self._original.__class__ = cls

    def __getattr__(self, name: str) -> Any:
        if name in AmpModule._OWN:
            raise AttributeError(name)
        if name == "__signature__" and self._is_function:
            return inspect.signature(self._original)
        found = getattr(self._original, name)
        if isinstance(found, types.MethodType) and found.__self__ is self._original and not self._is_function:
            return self._calling_compiled(found) if self._came_with(name) else types.MethodType(found.__func__, self)
        return found

    def _came_with(self, name: str) -> bool:
        """False for attributes of a class that the original was given later: the code that did so (fully_shard) got
        this object, and knows only this one."""
        return hasattr(self._given_class, name)

    def _calling_compiled(self, method: Any) -> Callable[..., Any]:
        """Return a method of the original (``generate``) that calls the compiled forward when it calls the model."""
        other, original = self._stand_in, self._original
        if other is None or not isinstance(other, type(original)) or other.__dict__ is not original.__dict__:
            other = stand_in(original, self)
            object.__setattr__(self, "_stand_in", other)
        return calling(method, other, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in AmpModule._OWN or not self.__dict__.get("_ready", False):
            object.__setattr__(self, name, value)
        elif self._is_function or self._stays_here(name, value):
            self.__dict__[name] = value
        else:
            setattr(self._original, name, value)

    def _stays_here(self, name: str, value: Any) -> bool:
        """True if an attribute that is set belongs to this object; the class's docstring has the rule."""
        if name in _MACHINERY:
            return True
        if inspect.getattr_static(self._original, name, self) is not self:
            return False
        if any(name in held for held in (self._parameters, self._buffers, self._modules)):
            return False
        if isinstance(value, (nn.Module, torch.Tensor)):
            return False
        return name.startswith("_") or getattr(value, "__self__", None) is self

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ and name not in AmpModule._OWN:
            del self.__dict__[name]
        else:
            delattr(self._original, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self._original)})

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpModule:
        twin = AmpModule(copy.deepcopy(self._original, memo), self._options)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self._kept(), memo))
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return AmpModule, (self._original, self._options), self._kept()

    def _kept(self) -> dict[str, Any]:
        """Return what a copy needs besides the original and the options: the switch, hooks, and users' attributes."""
        held = {name: value for name, value in self.__dict__.items() if name not in AmpModule._OWN}
        return {"enabled": self.enabled, "held": {name: value for name, value in held.items() if value is not None}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.enabled = state["enabled"]
        self.__dict__.update(state.get("held", {}))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a decorated method like any other; a compiled module in a class body is just a value."""
        if instance is None or not self._is_function:
            return self
        if torch.compiler.is_compiling():  # torch 2.13: Dynamo cannot call a method whose function is an object
            return functools.partial(self, instance)
        return types.MethodType(self, instance)

    def __repr__(self) -> str:
        policy = self.policy
        return f"amp_compile(level={policy.level!r}, dtype={dtype_name(policy.low)})({self._original!r})"


def warn_of_export() -> None:
    warnings.warn(
        "torch.export exports the original of a compiled module, in fp32: use convert_model for a program in mixed "
        "precision.", AmpWarning, stacklevel=users_frame(),
    )  # fmt: skip


def _as_original_does(name: str) -> Callable[..., Any]:
    """Return a method of nn.Module that the original's class may override."""
    plain = getattr(nn.Module, name)

    @functools.wraps(plain)
    def run(self: AmpModule, *args: Any, **kwargs: Any) -> Any:
        if self._is_function or getattr(type(self._original), name) is plain:
            return plain(self, *args, **kwargs)
        if getattr(self._given_class, name) is plain:
            return getattr(type(self._original), name)(self, *args, **kwargs)
        result = getattr(self._original, name)(*args, **kwargs)
        return self if result is self._original else result

    return run


for _name in ("to", "cpu", "cuda", "float", "half", "bfloat16", "double", "type", "to_empty", "requires_grad_",
              "zero_grad", "_apply"):  # fmt: skip
    setattr(AmpModule, _name, _as_original_does(_name))


class AmpFunction(AmpModule):
    """A compiled function, which reports don't show as a module of the model (``capture/origin.py`` knows its name)."""


_NO_TORCHSCRIPT = (
    "TorchScript does not support it. Pass compiled.original, in fp32, or save a mixed-precision program with "
    "convert_model."
)


def _delegating(name: str) -> Callable[..., Any]:
    def run(self: AmpModule, *args: Any) -> Any:
        return getattr(type(self._original), name)(self._original, *args)

    return run


#: methods of modules with items, such as nn.Sequential; Python looks them up on the class only
_ITEMS = {name: _delegating(name) for name in
          ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__")}  # fmt: skip
_CLASSES: weakref.WeakKeyDictionary[type, type[AmpModule]] = weakref.WeakKeyDictionary()


def _class_for(target: Any) -> type[AmpModule]:
    """Return a subclass of ``AmpModule`` whose forward has the signature of ``target``'s, with items if ``target`` has
    some. Signatures belong to functions and items to classes, so there is one subclass per class of models."""
    if not isinstance(target, nn.Module):
        return AmpFunction
    own = "forward" in target.__dict__
    known = None if own else _CLASSES.get(type(target))
    if known is not None:
        return known
    plain: Any = AmpModule.forward
    forward: Any = types.FunctionType(plain.__code__, plain.__globals__, "forward", None, plain.__closure__)
    with contextlib.suppress(ValueError, TypeError):  # a builtin may have no signature
        given = inspect.signature(target.forward)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = given.replace(parameters=[first, *given.parameters.values()])
    forward.__doc__ = target.forward.__doc__
    members = {name: method for name, method in _ITEMS.items() if hasattr(type(target), name)}
    made = type("AmpModule", (AmpModule,), {"forward": forward, "__module__": __name__, **members})
    if not own:
        _CLASSES[type(target)] = made
    return made


class AmpMethod:
    """A compiled method of a module. It isn't a module itself, so ``model.forward = amp_compile(model.forward)`` sets
    an attribute (nn.Module would register a module as a child, and keep calling the class's forward)."""

    _amp_compiled = True

    def __init__(self, compiled: AmpModule) -> None:
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_compiled":
            raise AttributeError(name)
        return getattr(self._compiled, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpMethod:
        return AmpMethod(copy.deepcopy(self._compiled, memo))

    def __repr__(self) -> str:
        return repr(self._compiled)
