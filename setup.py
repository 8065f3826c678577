"""Puts the compiled CPU kernels into the wheel: on Linux on x86-64, where there is a C++ compiler.

An editable install compiles those for this CPU, into the folder where the first call looks for them.
``AMP_BUILD_KERNELS=0`` leaves them out, and ``=1`` makes it an error if they cannot be compiled. Without them the wheel
is for any machine, and the kernels are compiled when they are first needed. Everything else is in ``pyproject.toml``.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

# By path: the package itself imports torch, which is not there while a wheel is built.
_spec = importlib.util.spec_from_file_location("compile_cpp", Path(__file__).parent / "kernels" / "compile_cpp.py")
compile_cpp = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(compile_cpp)

ASKED = os.environ.get("AMP_BUILD_KERNELS", "auto")
COMPILER = compile_cpp.find_compiler()
FITS = sys.platform == "linux" and platform.machine() == "x86_64" and COMPILER is not None
if ASKED == "1" and not FITS:
    sys.exit("AMP_BUILD_KERNELS=1 needs Linux on x86-64 and a C++ compiler: install g++ or set CXX=/path/to/one.")
WITH_KERNELS = FITS and ASKED != "0"


class BuildWithKernels(build_py):
    """Compiles the libraries beside the copied modules; for an editable install, the one for this CPU in the cache."""

    def run(self) -> None:
        super().run()
        if not WITH_KERNELS:
            return
        try:
            if self.editable_mode:
                self._compile(compile_cpp.cache_folder(), [compile_cpp.kind_here()])
            else:
                self._compile(Path(self.build_lib) / "amp_compiler" / "kernels" / "lib", ["avx2", "avx512"])
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home folder
            if ASKED == "1":
                raise
            print(f"without compiled kernels: {error}\n{getattr(error, 'stderr', '')}", file=sys.stderr)

    def _compile(self, folder: Path, kinds: list[str | None]) -> None:
        for kind in filter(None, kinds):
            path = folder / compile_cpp.library_name(kind)
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                compile_cpp.compile_library(COMPILER, kind, path)


class WheelOfAnyPython(bdist_wheel):
    """The libraries depend on the platform, and on no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class DistributionWithLibraries(Distribution):
    """Makes the wheel one of a platform if it contains libraries."""

    def has_ext_modules(self) -> bool:
        return WITH_KERNELS


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
    distclass=DistributionWithLibraries,
)
