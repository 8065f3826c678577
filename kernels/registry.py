"""Which kernels the CPU's ops run: those written in Python, or the compiled library once it has taken their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from amp_compiler.common.torch_names import unregister

_KERNELS: dict[str, Callable[..., Any]] = {}  # in Python, by the name of the op
_REGISTERED: dict[str, torch.library.Library] = {}
_LOADED: list[Path] = []  # the library, once it is in this process


def in_python(kernels: Iterable[tuple[str, Callable[..., Any]]]) -> None:
    """Register kernels for the CPU that the compiled library, if there is one, takes the place of."""
    for name, kernel in kernels:
        _KERNELS[name] = kernel
        if not loaded():
            _register(name)


def python_kernel(name: str) -> Callable[..., Any]:
    """The kernel in Python of the op ``amp::<name>``, which stands behind the compiled one."""
    return _KERNELS[name]


def loaded() -> bool:
    """True if the compiled kernels are in this process."""
    return bool(_LOADED)


def take_over(library: Path) -> None:
    """Load a compiled library in place of the kernels in Python; if that fails, they stay. Its ops must be defined."""
    while _REGISTERED:
        unregister(_REGISTERED.popitem()[1])
    try:
        torch.ops.load_library(library)
    except BaseException:
        for name in _KERNELS:
            _register(name)
        raise
    _LOADED.append(library)


def _register(name: str) -> None:
    _REGISTERED[name] = torch.library.Library("amp", "IMPL", "CPU")
    _REGISTERED[name].impl(name, _KERNELS[name])
