"""Precision chosen inside a model's own code: ``precision(...)`` regions and ``set_precision`` on modules."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import nn

from ..common.errors import ArgumentError
from ..common.torch_names import inside_ddp
from .dtypes import dtype_name, precision_dtype

ATTRIBUTE = "_amp_precision"

# A scope is marked in a captured graph by a node where it begins and one where it ends ("": the end). Like the nodes of
# nested torch.autocast regions, they carry the module stack of the code that opened them, so ``normalize`` knows which
# is inside which; annotations on the nodes between would not show that. The op is composite: a plain torch.compile
# without our backend decomposes it to nothing.
_LIBRARY = torch.library.Library("amp", "FRAGMENT")
_LIBRARY.define("scope(str precision) -> ()")
_LIBRARY.impl("scope", lambda precision: None, "CompositeImplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.amp.scope.default)
# Marks the output of a graph that is the loss of a training step; ``capture/lower.py`` removes it.
_LIBRARY.define("loss(Tensor(a) loss) -> Tensor(a)")
_LIBRARY.impl("loss", torch.ops.aten.alias.default, "CompositeImplicitAutograd")


def precision(dtype: Any) -> contextlib.AbstractContextManager[None]:
    """Run the ops inside a region in one precision, whatever the level says.

    Use it inside a model's code, as a context manager or a decorator. The innermost region wins, and it holds for the
    backward as well. Outside of a model that is being captured it does nothing.

    Args:
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"``, or the torch dtype.

    Examples:
        >>> import torch
        >>> from amp_compiler import amp_compile, precision
        >>> def model(x, w):
        ...     with precision("float32"):
        ...         return x @ w
        >>> fast = amp_compile(model)
        >>> _ = fast(torch.ones(2, 2), torch.ones(2, 2))
        >>> fast.report().rows[0].precision
        'float32'
    """
    return _scope(dtype_name(precision_dtype(dtype)))


@contextlib.contextmanager
def _scope(name: str) -> Iterator[None]:
    """Open a scope. A generator, because Dynamo (torch 2.13) does not trace a class with ``__enter__`` here."""
    if not torch.compiler.is_compiling():
        with _opened_by_python(name):
            yield
        return
    torch.ops.amp.scope(name)
    try:
        yield
    finally:
        torch.ops.amp.scope("")


class _Thread(threading.local):
    """The precision scopes that plain Python, not a trace, has opened: the open ones, and how many there have been."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.count = 0
        self.calls = 0  # of compiled models that are running


_PYTHON = _Thread()


@contextlib.contextmanager
def _opened_by_python(name: str) -> Iterator[None]:
    """Record the scope, and make Dynamo's guards see it, so that code compiled inside is not reused outside.

    The guards check whether autocast's cache is enabled (torch 2.13). In a call of a compiled model autocast is off, so
    changing that switch has no other effect there.
    """
    _PYTHON.open.append(name)
    _PYTHON.count += 1
    before = torch.is_autocast_cache_enabled()
    if _PYTHON.calls:
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        _PYTHON.open.pop()


@contextlib.contextmanager
def inside_call() -> Iterator[Surroundings]:
    """Enclose a call of a compiled model; yield the regions around it."""
    around = begin_call()
    try:
        yield around
    finally:
        end_call()


def begin_call() -> Surroundings:
    """Begin a call of a compiled model, which ``end_call`` must end; return the regions around it."""
    python = _PYTHON
    python.calls += 1
    torch.autocast_increment_nesting()  # as ``Surroundings.now``, once per call of a model
    return Surroundings(len(python.open), torch.autocast_decrement_nesting(), python.count)


def end_call() -> None:
    _PYTHON.calls -= 1


def scopes_opened() -> int:
    """Return the number of scopes that plain Python has opened so far in this thread."""
    return _PYTHON.count


def is_inside_call() -> bool:
    """True if a compiled model is being called or captured in this thread."""
    return _PYTHON.calls > 0


class Surroundings(NamedTuple):
    """The regions around code that is about to run."""

    scopes: int
    autocasts: int
    opened: int  # scopes that this thread has opened so far

    @staticmethod
    def now() -> Surroundings:
        torch.autocast_increment_nesting()
        return Surroundings(len(_PYTHON.open), torch.autocast_decrement_nesting(), _PYTHON.count)

    def region_since(self) -> tuple[str, torch.dtype | None] | None:
        """Return (kind, dtype) of a region that Python has opened since, as when a graph breaks inside one, or None."""
        after = Surroundings.now()
        if after.scopes > self.scopes:
            return "precision", precision_dtype(_PYTHON.open[-1])
        if after.autocasts > self.autocasts:
            device = next((d for d in ("cuda", "cpu") if torch.is_autocast_enabled(d)), None)
            return "autocast", torch.get_autocast_dtype(device) if device is not None else None
        return None


def set_precision(module: nn.Module, dtype: Any) -> nn.Module:
    """Mark a module, and everything below it, to run in one precision.

    The mark acts on graphs that are captured afterwards, so set it before the first call of the compiled model.

    Args:
        module: The module to mark.
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"``, the torch dtype, or None to remove the mark.

    Returns:
        The module.

    Examples:
        >>> from torch import nn
        >>> from amp_compiler import set_precision
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> set_precision(model[1], "float32")
        Linear(in_features=4, out_features=2, bias=True)
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"set_precision takes a torch.nn.Module, not {type(module).__name__}.")
    marked = original_of(module)
    if dtype is None:
        marked.__dict__.pop(ATTRIBUTE, None)
    else:
        marked.__dict__[ATTRIBUTE] = precision_dtype(dtype)
    return module


def original_of(module: nn.Module) -> nn.Module:
    """Return the original of a module compiled by ``amp_compile``; any other module unchanged."""
    found = module.__dict__["_original"] if getattr(type(module), "_amp_compiled", False) else module
    return found if isinstance(found, nn.Module) else module


def marked_modules(modules: Mapping[str, nn.Module]) -> dict[str, torch.dtype]:
    """Return path -> dtype for each module that ``set_precision`` marked."""
    marks = {path: original_of(m).__dict__.get(ATTRIBUTE) for path, m in modules.items()}
    return {path: dtype for path, dtype in marks.items() if dtype is not None}


def paths_of(target: Any) -> dict[int, str]:
    """Return id of module -> its first path, for all of ``modules_of``; a compiled module has its original's path."""
    found: dict[int, str] = {}
    for path, module in modules_of(target).items():
        found.setdefault(id(module), path)
        found.setdefault(id(original_of(module)), path)
    return found


def modules_of(target: Any) -> dict[str, nn.Module]:
    """Return path -> module for all modules that a model, or a function that calls models, can call. A module with two
    names has two paths."""
    if isinstance(target, nn.Module):
        named = dict(target.named_modules(remove_duplicate=False))
        inner = inside_ddp(target)  # "fc" is another name of "module.fc" there
        own = {} if inner is None else dict(inner.named_modules(remove_duplicate=False))
        return {**named, **{path: m for path, m in own.items() if path not in named}}
    owner = getattr(target, "__self__", None)
    if isinstance(owner, nn.Module):
        return modules_of(owner)
    found: dict[str, nn.Module] = {}
    if inspect.isfunction(target):
        seen = inspect.getclosurevars(target)
        for name, value in (*seen.globals.items(), *seen.nonlocals.items()):
            if isinstance(value, nn.Module):
                found.update({f"{name}.{path}".rstrip("."): m for path, m in modules_of(value).items()})
    return found
