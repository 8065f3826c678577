"""``amp_compile``: a model in fp32 in, the same model in mixed precision out."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import fx, nn

from . import pipeline
from .arguments import call_arguments, check_request
from .backend import Captured, Options, State
from .errors import ArgumentError
from .methods import calling, stand_in
from .ops.names import OpLike
from .policy import Policy, dtype_name
from .report import Report

_FIRST_CALLS = threading.RLock()


class AmpModule(nn.Module):
    """What ``amp_compile`` returns: behaves as the original module and runs in mixed precision.

    Parameters, buffers and submodules are the original's own objects, so ``state_dict()`` has the original's
    keys and any optimizer works. ``enabled = False`` runs the original.
    """

    _OWN = ("enabled", "training", "_original", "_options", "_state", "_compiled", "_modules", "_parameters",
            "_buffers", "_is_function", "_ready", "_stand_in")  # fmt: skip

    def __init__(self, target: Callable[..., Any], options: Options) -> None:
        is_function = not isinstance(target, nn.Module)
        object.__setattr__(self, "_ready", False)
        super().__init__()
        object.__setattr__(self, "_original", target)
        object.__setattr__(self, "_is_function", is_function)
        object.__setattr__(self, "_options", options)
        object.__setattr__(self, "_state", State())
        object.__setattr__(self, "_compiled", None)
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
        if self._compiled is None:
            self._begin()
        return self._compiled(*args, **kwargs)

    def _begin(self) -> None:
        with _FIRST_CALLS:  # several threads may come at once
            if self._compiled is None:
                captured = Captured(self._original, self._original, self._options, self._state)
                object.__setattr__(self, "_compiled", captured)

    # ------------------------------------------------------------------------------------------- looking

    @property
    def original(self) -> Any:
        """The module or function that was compiled, untouched."""
        return self._original

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        policy: Policy = self._options.policy
        return policy

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """The rewritten forward graphs, one for each piece and each re-compilation."""
        return [piece.graph for piece in self._state.pieces]

    @property
    def history(self) -> list[pipeline.Record]:
        """Every stage of every graph: name, seconds, modified, text."""
        return list(self._state.history)

    def report(self, graph: int | None = None, *, inputs: Any = None) -> Report:
        """Every op with its precision and why, over all graphs captured so far (or one of them).

        With ``inputs`` (a tensor, a tuple of arguments or a dict of keyword arguments) the model is called once more,
        and ``report().work`` tells which share of its products and convolutions ran "captured", which outside of the
        graphs under "autocast", and which there in "float32", by FLOPs; a warning names the places of the last.
        Buffers and random generators are afterwards as they were; what else the model's code does is done again.

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
        """The original's mode."""
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
        return (
            super().state_dict(*args, **kwargs)
            if self._is_function
            else self._original.state_dict(*args, **kwargs)
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_function:
            return super().load_state_dict(*args, **kwargs)
        return self._original.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in AmpModule._OWN:
            raise AttributeError(name)
        found = getattr(self._original, name)
        if isinstance(found, types.MethodType) and found.__self__ is self._original and not self._is_function:
            return self._calling_compiled(found)
        return found

    def _calling_compiled(self, method: Any) -> Callable[..., Any]:
        """A method of the original (``generate``) that finds the compiled forward when it calls the model."""
        other, original = self._stand_in, self._original
        if other is None or not isinstance(other, type(original)) or other.__dict__ is not original.__dict__:
            other = stand_in(original, self)
            object.__setattr__(self, "_stand_in", other)
        return calling(method, other, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in AmpModule._OWN or not self.__dict__.get("_ready", False) or self._is_function:
            object.__setattr__(self, name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpModule:
        twin = AmpModule(copy.deepcopy(self._original, memo), self._options)
        twin.enabled = self.enabled
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return AmpModule, (self._original, self._options), {"enabled": self.enabled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.enabled = state["enabled"]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A decorated method is bound like any other; a compiled module in a class body is just a value."""
        return self if instance is None or not self._is_function else types.MethodType(self, instance)

    def __repr__(self) -> str:
        policy = self.policy
        return f"amp_compile(level={policy.level!r}, dtype={dtype_name(policy.low)})({self._original!r})"


class AmpMethod:
    """A compiled method of a module. No module itself, so that ``model.forward = amp_compile(model.forward)`` sets an
    attribute (nn.Module would file another module away as a child, and go on calling the class's forward)."""

    def __init__(self, compiled: AmpModule) -> None:
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_compiled":
            raise AttributeError(name)
        return getattr(self._compiled, name)

    def __repr__(self) -> str:
        return repr(self._compiled)


# ------------------------------------------------------------------------------------------- the function


@overload
def amp_compile(
    model: Callable[..., Any], level: str = ..., *, dtype: torch.dtype | str | None = ..., policy: Policy | None = ...,
    white_list: Iterable[OpLike] = ..., black_list: Iterable[OpLike] = ...,
    exclude: Iterable[str | type[nn.Module]] = ..., backend: str = ..., keep_output_dtypes: bool = ...,
    dynamic: bool | None = ..., fullgraph: bool = ..., disable_passes: Iterable[str] = ...,
) -> AmpModule: ...  # fmt: skip
@overload
def amp_compile(
    model: None = None, level: str = ..., *, dtype: torch.dtype | str | None = ..., policy: Policy | None = ...,
    white_list: Iterable[OpLike] = ..., black_list: Iterable[OpLike] = ...,
    exclude: Iterable[str | type[nn.Module]] = ..., backend: str = ..., keep_output_dtypes: bool = ...,
    dynamic: bool | None = ..., fullgraph: bool = ..., disable_passes: Iterable[str] = ...,
) -> Callable[[Callable[..., Any]], AmpModule]: ...  # fmt: skip
def amp_compile(
    model: Callable[..., Any] | None = None,
    level: str = "O2",
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | None = None,
    white_list: Iterable[OpLike] = (),
    black_list: Iterable[OpLike] = (),
    exclude: Iterable[str | type[nn.Module]] = (),
    backend: str = "auto",
    keep_output_dtypes: bool = True,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    disable_passes: Iterable[str] = (),
) -> Any:
    """Compile a module or function to mixed precision; it is captured at its first call.

    ``level``: "O0", "O1", "auto", "O2" or "O3". ``dtype``: float16 or bfloat16 (default: fp16 on CUDA, bf16
    elsewhere). ``policy``: a ``Policy`` instead of level and dtype. ``white_list`` / ``black_list``: ops to run
    low / in fp32. ``exclude``: modules to leave in fp32, by path pattern or class. ``backend``: "eager",
    "inductor" or "auto" (inductor on CUDA). ``disable_passes``: names of passes to leave out.
    The model itself is never changed. Without a model it is a decorator.

    >>> fast = amp_compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), level="O1")
    >>> _ = fast(torch.ones(1, 4))
    >>> fast.report().by_precision["bfloat16"]
    3
    """
    for name, value, allowed in (("dynamic", dynamic, (True, False, None)), ("fullgraph", fullgraph, (True, False)),
                                 ("keep_output_dtypes", keep_output_dtypes, (True, False))):  # fmt: skip
        if not any(value is choice for choice in allowed):
            raise ArgumentError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}.")
    # made once for a wrong name to show at once; the decorator below may never be applied
    asked = check_request(level, dtype, policy, white_list, black_list, exclude, backend, disable_passes)

    def compile_one(target: Callable[..., Any]) -> AmpModule | AmpMethod:
        if isinstance(target, (AmpModule, AmpMethod)):
            raise ArgumentError("This module is amp_compile'd already: compile module.original with the new options.")
        if isinstance(target, type) or not callable(target):
            what = f"the class {target.__name__}" if isinstance(target, type) else f"{type(target).__name__} {target!r}"
            raise ArgumentError(f"amp_compile takes a torch.nn.Module or a function, not {what}.")
        options = Options(
            asked.policy_for(target), backend, keep_output_dtypes, dynamic, fullgraph, asked.disable_passes
        )
        made = AmpModule(target, options)
        of_a_module = isinstance(getattr(target, "__self__", None), nn.Module)
        return AmpMethod(made) if of_a_module else made

    return compile_one if model is None else compile_one(model)


