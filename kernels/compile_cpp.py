"""Compiles the CPU kernels in C++ (``cpp/``) into one library: its two files side by side, one process each. They take
about as long as each other: ``loops.cpp`` has the loops, for every dtype, and ``ops.cpp`` what calls them.

The kernels call torch through C functions that it keeps compatible, and declare those themselves, so neither torch nor
its headers are needed here: ``setup.py`` loads this file to put libraries into a wheel, and ``build.py`` compiles with
it on a machine that has no such library. It imports the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("cpp")
CACHE = "AMP_CACHE_DIR"
#: kind of CPU -> what the compiler calls it
MARCH = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "native": "native"}
MINUTES = 5  # timeout of the compiler
#: the file with the loops, which take the kernels' time; the rest calls them, and torch. For loops that are written
#: with vectors, -O3 takes longer than -O2 with short loops unrolled (by -fpeel-loops), and gives no faster code
_LOOPS = "loops.cpp"
_FLAGS = ("-std=c++17", "-fpeel-loops", "-fPIC", "-fvisibility=hidden")
#: torch's library, by the name with which it is in the process already; an empty one stands for it while linking
_TORCH = "libtorch_cpu.so"


def find_compiler() -> str | None:
    """Return the C++ compiler: what ``CXX`` says, or the first that there is."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def cache_folder() -> Path:
    """Return where libraries that were compiled on this machine are kept."""
    own = os.environ.get(CACHE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amp_compiler"


def kind_here() -> str | None:
    """Return the kind of this CPU, by what Linux tells of it; None if it has less than AVX2. An installer asks, which
    has no torch; ``capability.py`` has the last word when kernels are loaded."""
    there = set(_features().split())
    wanted = {
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"},
        "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm"},
    }
    return next((kind for kind, flags in wanted.items() if flags <= there), None)


def library_name(kind: str) -> str:
    """Return the file name of the library for a kind of CPU. It changes when a source or a flag does."""
    files = [file for file in sorted(SOURCES.iterdir()) if file.is_file()]
    parts = [*_flags(kind), *(_level(file) + file.name + file.read_text() for file in files)]
    if kind == "native":
        parts.append(_features())
    return f"cpu_kernels_{kind}_{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}.so"


def compile_library(compiler: str, kind: str, path: Path) -> None:
    """Compile the library for a kind of CPU; it appears at ``path`` as a whole, or not at all."""
    command = shlex.split(compiler)
    with tempfile.TemporaryDirectory(dir=path.parent) as name, ThreadPoolExecutor(_cores()) as processes:
        folder = Path(name)
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda file: file.stat().st_size)
        objects = [str(folder / f"{source.stem}.o") for source in sources]
        commands = [
            [*command, *_flags(kind), _level(source), "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        stand_in = ["-shared", "-fPIC", f"-Wl,-soname,{_TORCH}", "-x", "c++", os.devnull, "-o", str(folder / _TORCH)]
        commands.append([*command, *stand_in])
        list(processes.map(_run, commands))
        made = str(folder / path.name)
        _run([*command, "-shared", "-s", *objects, "-o", made, f"-L{folder}", "-Wl,--no-as-needed", "-ltorch_cpu"])
        os.replace(made, path)


def _flags(kind: str) -> tuple[str, ...]:
    return (f"-march={MARCH[kind]}", *_FLAGS)


def _level(source: Path) -> str:
    return "-O2" if source.name == _LOOPS else "-O1"


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60 * MINUTES)


def _features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cores() -> int:
    return len(os.sched_getaffinity(0))
