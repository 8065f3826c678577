"""A CPU without AVX-512 on one that has it: what is compiled, what is chosen, and that the kernels are right there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amp_compiler.kernels import build, capability, compile_cpp, cpu

ROOT = Path(__file__).parents[2]
NEWEST = {"avx2": True, **{f"avx512_{part}": True for part in ("f", "bw", "vl", "dq", "cd", "bf16")}} | {
    "amx_bf16": True, "amx_fp16": True,
}  # fmt: skip
OLD = {"avx2": True, "avx512_f": False}


def has(monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], setting: str | None = None) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    monkeypatch.delenv(capability.SETTING, raising=False)
    if setting is not None:
        monkeypatch.setenv(capability.SETTING, setting)


def test_all_is_used_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, NEWEST)
    assert capability.features() == ("avx2", "avx512", "avx512_bf16", "amx_bf16", "amx_fp16")
    assert capability.kernel_kind() == "avx512"
    assert cpu.has_units(torch.bfloat16)
    assert cpu.has_units(torch.float16)


def test_avx2_is_an_older_cpu_for_kernels_and_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, NEWEST, "avx2")
    assert capability.features() == ("avx2",)
    assert capability.kernel_kind() == "avx2"
    assert compile_cpp.library_name("avx2") != compile_cpp.library_name("avx512")
    assert not cpu.has_units(torch.bfloat16)
    assert not cpu.has_units(torch.float16)


def test_kernels_want_all_of_avx2_and_what_comes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, OLD)
    assert capability.kernel_kind() == "avx2"
    has(monkeypatch, NEWEST, "baseline")
    assert capability.kernel_kind() is None
    has(monkeypatch, OLD | {"f16c": False})
    assert capability.kernel_kind() is None
    monkeypatch.setattr(capability.platform, "machine", lambda: "aarch64")
    assert capability.kernel_kind() == "native"


def test_a_wrong_name_is_an_error_that_lists_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, NEWEST, "avx3")
    with pytest.raises(ValueError, match=r"AMP_CPU_CAPABILITY='avx3' is not one of: native, avx512, avx2, baseline"):
        capability.features()


def test_what_the_cpu_lacks_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, OLD, "avx512")
    with pytest.raises(ValueError, match="asks for avx512, which this CPU does not have"):
        capability.kernel_kind()


def test_the_kernels_of_an_avx2_machine() -> None:
    """Other tests of this folder, in a process that has AVX2 and nothing newer. ``make test-avx2`` runs them all."""
    if "avx512" not in capability.features():
        pytest.skip("this CPU has no AVX-512, or is told not to use it: all tests run so")
    if not build.prepare().loaded:
        pytest.skip(f"no compiled kernels on this machine: {build.prepare().reason}")
    older = {capability.SETTING: "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    files = [f"tests/kernels/test_{name}.py" for name in ("cast_matmul", "wide", "unscale", "norm", "lstm")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not zoo",
               "-k", "not python", "-W", "error:.*could not be compiled", *files]  # fmt: skip
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | older, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " skipped" not in ran.stdout.splitlines()[-1], ran.stdout[-3000:]
