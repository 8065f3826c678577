"""The CPU kernels in C++ (``cpp/``): finds the library for this CPU, compiles it where there is none, and loads it.

``prepare`` is called by a back end that is about to run a graph with low-precision ops on a CPU
(``runtime/prepare.py``), and by ``amp-compiler doctor``. There is one library per kind of CPU (``capability.py``),
which serves every supported release of torch. A wheel for Linux on x86-64 contains them (``lib/``), and an editable
install compiles the one for its CPU (``setup.py``). Otherwise the system's compiler builds it in a few seconds, with a
line on stderr before and after (``AMP_LOGS=quiet`` suppresses them). If several threads or processes need it at the
same time, one compiles and the others wait. It is kept in ``~/.cache/amp_compiler`` (or ``$XDG_CACHE_HOME``, or
``$AMP_CACHE_DIR``) under a name that depends on the sources, so a change of those builds a new one. Where there is no
library and no compiler, on a CPU without AVX2, and with ``AMP_CPU_KERNELS=python``, the same ops run in Python: the
same numbers within fp32's rounding, 20 to 50 % slower.
"""

from __future__ import annotations

import fcntl
import functools
import os
import struct
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from amp_compiler.common.notice import tell

from . import capability, compile_cpp, registry
from . import cast_matmul as _defines_cast_matmul  # noqa: F401  (torch wants the library's ops defined before it)
from . import wide as _defines_wide  # noqa: F401
from .compile_cpp import cache_folder as cache_folder

PACKAGED = Path(__file__).with_name("lib")
CACHE = compile_cpp.CACHE
_SECONDS = 3  # what compiling takes, roughly, on two cores
_PREPARING = threading.RLock()  # one thread loads, others wait


@dataclass(frozen=True)
class Built:
    """Whether the compiled kernels run, and why not or where they are."""

    loaded: bool
    reason: str


def prepare() -> Built:
    """Load the compiled kernels into this process, after compiling them if there are none for this CPU yet.

    A back end calls it before passes choose kernels for a graph; the second call costs nothing. A failure becomes a
    reason and, if there was something to load or to compile with, a warning; the kernels in Python stay in use.
    """
    with _PREPARING:
        return _prepare()


@functools.cache
def _prepare() -> Built:
    if sys.platform != "linux":
        return Built(False, f"the kernels in Python: the compiled ones are for Linux, but this is {sys.platform}")
    path: Path | None = None
    compiler = compile_cpp.find_compiler()
    try:
        kind = capability.kernel_kind()
        if kind is None:
            return Built(False, f"the kernels in Python: the compiled ones need AVX2{_without_avx2()}")
        name = compile_cpp.library_name(kind)
        path = PACKAGED / name
        if not _is_whole(path):
            path = None
            if compiler is None:
                return Built(
                    False,
                    "the kernels in Python: this installation has no compiled ones, and there is no C++ compiler; "
                    "install a wheel for Linux on x86-64, or install g++ or set CXX=/path/to/one",
                )
            path = _library(compiler, kind, name)
        registry.take_over(path)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        what, advice = _told(error, compiler or "", path)
        warnings.warn(
            f"amp_compiler's CPU kernels {what}. The same kernels in Python run instead, with the same results, 20 to "
            f"50 % slower. {advice} AMP_CPU_KERNELS=python skips the attempt and this warning.",
            stacklevel=3,
        )
        return Built(False, f"the kernels in Python: they {what}")
    return Built(True, f"compiled: {path}")


def _without_avx2() -> str:
    setting = os.environ.get(capability.SETTING)
    return f", which {capability.SETTING}={setting} forbids" if setting else ", which this CPU does not have"


def _told(error: Exception, compiler: str, path: Path | None) -> tuple[str, str]:
    """Return what went wrong and what to do about it."""
    said = getattr(error, "stderr", None) or str(error)
    first = next((line for line in said.splitlines() if "error" in line), said.strip().partition("\n")[0]).rstrip(".")
    if path is not None:
        packaged = path.parent == PACKAGED
        advice = "Install the package again." if packaged else f"Delete {path}, so that they are compiled again."
        return f"were compiled but cannot be loaded: {first}", advice
    if isinstance(error, subprocess.TimeoutExpired):
        what = f"could not be compiled: {compiler} timed out after {compile_cpp.MINUTES} minutes"
        return what, "Try again on an idle machine."
    install = "Install a compiler for C++20 (g++ 11 or newer: apt install g++), or set CXX=/path/to/one."
    if isinstance(error, subprocess.CalledProcessError):
        return f"could not be compiled by {compiler}: {first}", install
    if isinstance(error, OSError) and error.filename and Path(str(error.filename)).is_relative_to(cache_folder()):
        return f"could not be compiled: {first}", f"Set {CACHE} to a writable folder."
    return f"could not be compiled by {compiler}: {first}", install


def _library(compiler: str, kind: str, name: str) -> Path:
    """Return the library in the cache, after compiling it if there is none, or one that was cut short."""
    folder = cache_folder()
    path = folder / name
    if _is_whole(path):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        _acquire(lock)
        if not _is_whole(path):
            tell(f"compiling CPU kernels, once per machine, about {_SECONDS} s (AMP_LOGS=quiet hides this) ...")
            start = time.perf_counter()
            compile_cpp.compile_library(compiler, kind, path)
            tell(f"compiled CPU kernels in {time.perf_counter() - start:.1f} s; they are kept in {folder}")
    return path


def _is_whole(path: Path) -> bool:
    """True if there is a library that was not cut short: loading a part of one can end the process."""
    try:
        with open(path, "rb") as file:
            header = file.read(64)
    except OSError:
        return False
    if header[:4] != b"\x7fELF" or len(header) < 64:
        return False
    (start,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    end: int = start + size * count  # the table of sections is at the end of the file
    return path.stat().st_size >= end


def _acquire(lock: IO[str]) -> None:
    """Wait until no other process compiles. Where files cannot be locked (some network file systems), each process
    compiles for itself: the library is moved into place as a whole, so that does no harm."""
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process, which is compiling CPU kernels ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return
