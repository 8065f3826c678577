"""The CPU kernels in C++ (``cpp/``), compiled once, on the machine that runs them.

``prepare`` is called by a back end that is about to run a graph with low-precision ops on a CPU
(``runtime/prepare.py``), and by ``amp-compiler doctor``. With torch's headers, the system's compiler builds a library
of a few hundred kilobytes in 15 to 50 seconds, with a line on stderr before and after (``AMP_LOGS=quiet`` suppresses
them). If several threads or processes need it at the same time, one compiles and the others wait. The library is kept
in ``~/.cache/amp_compiler`` (or ``$XDG_CACHE_HOME``, or ``$AMP_CACHE_DIR``) under a name that depends on the sources,
torch's version and the CPU's features, so a change of any of them builds a new one. Without a compiler, and with
``AMP_CPU_KERNELS=python``, the same ops run in Python: the same numbers within fp32's rounding, 20 to 50 % slower.

The kernels are compiled for this machine's CPU, or for the one that ``AMP_CPU_CAPABILITY`` names (``capability.py``).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from amp_compiler.common.notice import tell

from . import capability, registry
from . import cast_matmul as _defines_cast_matmul  # noqa: F401  (torch wants the library's ops defined before it)
from . import wide as _defines_wide  # noqa: F401

SOURCES = Path(__file__).with_name("cpp")
CACHE = "AMP_CACHE_DIR"
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp")
_MINUTES = 5  # timeout of the compiler
_SECONDS = 30  # what it takes, roughly, on one core
_PREPARING = threading.RLock()  # one thread loads, others wait


@dataclass(frozen=True)
class Built:
    """Whether the compiled kernels run, and why not or where they are."""

    loaded: bool
    reason: str


def prepare() -> Built:
    """Load the compiled kernels into this process, after compiling them if this machine has none yet.

    A back end calls it before passes choose kernels for a graph; the second call costs nothing. A failure becomes a
    reason and, if there was a compiler, a warning; the kernels in Python stay in use.
    """
    with _PREPARING:
        return _prepare()


@functools.cache
def _prepare() -> Built:
    if sys.platform != "linux":
        return Built(False, f"the kernels in Python: the compiled ones are for Linux, but this is {sys.platform}")
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return Built(False, "the kernels in Python: there is no C++ compiler; install g++ or set CXX=/path/to/one")
    path: Path | None = None
    try:
        path = _library(compiler)
        registry.take_over(path)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        what, advice = _told(error, compiler, path)
        warnings.warn(
            f"amp_compiler's CPU kernels {what}. The same kernels in Python run instead, with the same results, 20 to "
            f"50 % slower. {advice} AMP_CPU_KERNELS=python skips the attempt and this warning.",
            stacklevel=3,
        )
        return Built(False, f"the kernels in Python: they {what}")
    return Built(True, f"compiled: {path}")


def _told(error: Exception, compiler: str, path: Path | None) -> tuple[str, str]:
    """Return what went wrong and what to do about it."""
    said = getattr(error, "stderr", None) or str(error)
    first = next((line for line in said.splitlines() if "error" in line), said.strip().partition("\n")[0]).rstrip(".")
    if path is not None:
        return f"were compiled but cannot be loaded: {first}", f"Delete {path}, so that they are compiled again."
    if isinstance(error, subprocess.TimeoutExpired):
        return f"could not be compiled: {compiler} timed out after {_MINUTES} minutes", "Try again on an idle machine."
    install = "Install a compiler for C++20 (g++ 11 or newer: apt install g++), or set CXX=/path/to/one."
    if isinstance(error, subprocess.CalledProcessError):
        return f"could not be compiled by {compiler}: {first}", install
    if isinstance(error, OSError) and error.filename and Path(str(error.filename)).is_relative_to(cache_folder()):
        return f"could not be compiled: {first}", f"Set {CACHE} to a writable folder."
    return f"could not be compiled by {compiler}: {first}", install


def _library(compiler: str) -> Path:
    folder = cache_folder()
    path = folder / f"cpu_kernels_{_key(compiler)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        _acquire(lock)
        if not path.exists():
            tell(f"compiling CPU kernels, once per machine, about {_SECONDS} s (AMP_LOGS=quiet hides this) ...")
            start = time.perf_counter()
            _compile(compiler, path)
            tell(f"compiled CPU kernels in {time.perf_counter() - start:.1f} s; they are kept in {folder}")
    return path


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


def _compile(compiler: str, path: Path) -> None:
    root = Path(torch.__file__).parent
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    command = [
        *shlex.split(compiler), *_flags(), f"-I{root / 'include'}", str(SOURCES / "ops.cpp"), "-o", name,
        f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60 * _MINUTES)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _flags() -> tuple[str, ...]:
    return (f"-march={capability.chosen().march}", *_FLAGS)


def cache_folder() -> Path:
    own = os.environ.get(CACHE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amp_compiler"


def _key(compiler: str) -> str:
    """Return a key for the sources, the torch and the kind of CPU that a library is valid for."""
    parts = [torch.__version__, platform.machine(), _features(), compiler, *_flags()]
    parts += [file.name + file.read_text() for file in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
