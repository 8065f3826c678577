"""Which kernels the CPU ops run: those written in Python, or the compiled library once it has replaced them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from amp_compiler.common.torch_names import unregister

_KERNELS: dict[str, Callable[..., Any]] = {}  # those in Python, by the name of the op
_REGISTERED: dict[str, torch.library.Library] = {}
_LOADED: list[Path] = []  # the library, once it is in this process


def in_python(kernels: Iterable[tuple[str, Callable[..., Any]]]) -> None:
    """Register CPU kernels that the compiled library, if there is one, replaces."""
    for name, kernel in kernels:
        _KERNELS[name] = kernel
        if not loaded():
            _register(name)


def python_kernel(name: str) -> Callable[..., Any]:
    """Return the Python kernel of the op ``amp::<name>``, which the compiled one replaces."""
    return _KERNELS[name]


def loaded() -> bool:
    """True if the compiled kernels are in this process."""
    return bool(_LOADED)


def take_over(library: Path) -> None:
    """Replace the kernels in Python by a compiled library; if loading it fails, they stay. Its ops must be defined."""
    while _REGISTERED:
        unregister(_REGISTERED.popitem()[1])
    try:
        register = ctypes.CDLL(str(library)).amp_register
        register.restype = ctypes.c_char_p
        error: bytes | None = register()
        if error is not None:
            raise RuntimeError(error.decode())
    except BaseException:
        for name in _KERNELS:
            _register(name)
        raise
    _LOADED.append(library)


def _register(name: str) -> None:
    _REGISTERED[name] = torch.library.Library("amp", "IMPL", "CPU")
    _REGISTERED[name].impl(name, _KERNELS[name])
