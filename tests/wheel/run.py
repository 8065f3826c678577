"""Checks an installed wheel, in an environment without a compiler: compiled kernels run, on either instruction set.

``make test-wheel`` runs it with the Python of a new environment; it needs the package and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from amp_compiler import amp_compile
from amp_compiler.kernels import build, capability

CHECKED = "AMP_CHECKED"  # set in the process that checks one instruction set


def check_kernels() -> None:
    """The kernels of the package run, and give what fp64 gives within the rounding of bf16."""
    built = build.prepare()
    assert built.loaded, built.reason
    assert str(build.PACKAGED) in built.reason, built.reason
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    x = torch.randn(16, 3, 8, 8)
    for dtype, bound in ((torch.bfloat16, 2**-6), (torch.float16, 2**-9)):
        compiled = amp_compile(model, dtype=dtype)
        result = compiled(x)
        result.sum().backward()
        assert compiled.report().kernels, "no op runs one of our kernels"
        expected = model.double()(x.double())
        model.float()
        error = (result - expected).abs().max() / expected.abs().max()
        assert error < bound, f"{dtype}: {error}"
    print(f"{os.environ[CHECKED]}: {built.reason}")


def main() -> None:
    if CHECKED in os.environ:
        return check_kernels()
    files = importlib.metadata.files("amp-compiler") or []
    print("\n".join(f"{f.size:>9,} {f}" for f in files if f.suffix == ".so"))
    print(f"{sum(f.size or 0 for f in files):>9,} bytes in {len(files)} files; torch {torch.__version__}")
    assert not any(map(shutil.which, ("c++", "g++", "clang++", "cc", "gcc"))), "there is a compiler"
    assert Path(build.__file__).is_relative_to(sys.prefix), f"{build.__file__} is not of the wheel"
    for kind in ("avx2", "avx512"):
        if kind in capability.features():
            forced = {CHECKED: kind, capability.SETTING: kind, "AMP_CPU_KERNELS": "wide"}
            subprocess.run([sys.executable, __file__], env=os.environ | forced, check=True)
        else:
            print(f"{kind}: this CPU does not have it, so it was not tried")
    wide = os.environ | {"COLUMNS": "200"}
    told = subprocess.run(["amp-compiler", "doctor"], env=wide, check=True, capture_output=True, text=True).stdout
    print(told)
    assert "compiled" in told
    assert not list(build.cache_folder().glob("*.so")), "something was compiled"


if __name__ == "__main__":
    main()
