"""The offline check: kernels compiled for GPUs that are not there. All configurations are in the zoo."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from amp_compiler.kernels import cast_matmul_triton, multi_tensor_triton
from amp_compiler.kernels.cast_matmul_configs import CONFIGS_SM90, TARGETS, Config
from amp_compiler.kernels.check import main
from amp_compiler.kernels.check_cases import LIMITS, PRODUCTS, cases, matmul_case, unscale_case
from amp_compiler.kernels.check_compile import Result, compile_case
from amp_compiler.kernels.interpret import interpreted

COMMAND = (sys.executable, "-m", "amp_compiler.kernels.check")
PLAIN = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

compiles = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="TRITON_INTERPRET: nothing is compiled")


@compiles
@pytest.mark.parametrize("target", LIMITS)
def test_one_of_each_kernel(target: str) -> None:
    results = [compile_case(case) for case in cases(target, quick=True)]
    names = {result.case.kernel.__name__ for result in results}
    assert names == {"matmul_kernel", "add_pieces_kernel", "unscale_kernel"}
    for result in results:
        assert not result.problems
        assert result.registers > 0
        assert 0 < result.occupancy <= 1
    assert results[0].unit == TARGETS[target].unit


@pytest.mark.zoo
def test_all() -> None:
    done = subprocess.run(COMMAND, env=PLAIN, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert ", 0 failed." in done.stdout


def test_command() -> None:
    done = subprocess.run([*COMMAND, "--quick", "--target", "sm_90"], env=PLAIN, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wgmma" in done.stdout
    assert CONFIGS_SM90[0].name in done.stdout
    assert "4 compiled, 0 failed." in done.stdout


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--target" in text
    assert "sm_80, sm_86, sm_90, sm_100, gfx942" in text


@compiles
def test_wide_loads() -> None:
    """Aligned tensors are loaded 16 bytes at a time, although the kernel finds their addresses in a table."""
    import triton

    seen: list[str] = []
    compile_triton = triton.compile

    def spy(*args: object, **kwargs: object) -> object:
        compiled = compile_triton(*args, **kwargs)
        seen.append(compiled.asm["ptx"])
        return compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", spy)
        for aligned in (True, False):
            compile_case(unscale_case("sm_80", "fp32", "fp32", True, aligned))
    assert ["ld.global.v4" in text for text in seen] == [True, False]


@compiles
def test_a_configuration_that_is_too_large(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It exits with 1 and says which and why."""
    large = Config(128, 128, 64, 8, 4, "does not fit 99 KB")
    monkeypatch.setitem(TARGETS, "sm_86", dataclasses.replace(TARGETS["sm_86"], configs=(large,)))
    assert main(["--quick", "--target", "sm_86"]) == 1
    text = capsys.readouterr().out
    assert "✗ sm_86, matmul_kernel, 128x128x64 w8 s4, fp32 · fp32 → bf16 in bf16, nt +bias: needs 1" in text
    assert "the target has 101376" in text
    assert "1 failed" in text


@compiles
def test_a_configuration_that_does_not_compile() -> None:
    result = compile_case(matmul_case("sm_80", Config(48, 64, 32, 4, 2, "not a power of 2"), PRODUCTS[0]))
    assert result.problems
    assert "does not compile" in result.problems[0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"unit": "mma.sync"}, "should use wgmma but uses mma.sync"),
        ({"unit": ""}, "should use wgmma but uses no tensor cores"),
        ({"spilled": 8}, "spills 8"),
        ({"shared": 300000}, "needs 300000 bytes of shared memory"),
        ({"error": "no"}, "does not compile: no"),
    ],
)
def test_problems(changes: dict[str, object], problem: str) -> None:
    good = Result(matmul_case("sm_90", CONFIGS_SM90[0], PRODUCTS[0]), "wgmma", 100, 0, 1000, 0.5)
    assert good.problems == ()
    (found,) = dataclasses.replace(good, **changes).problems
    assert found.startswith(problem)


def test_every_configuration_has_its_cases() -> None:
    for target, kind in TARGETS.items():
        wanted = {(config.name, product.ragged) for config in kind.configs for product in PRODUCTS}
        wanted -= {(config.name, True) for config in kind.configs if not config.takes_unaligned}
        matmuls = [case for case in cases(target) if case.kernel is cast_matmul_triton.matmul_kernel]
        assert {(case.name, not case.aligned) for case in matmuls} == wanted


@compiles
def test_the_interpreter_leaves_nothing_behind() -> None:
    kernel = multi_tensor_triton.unscale_kernel
    with interpreted(multi_tensor_triton):
        assert not isinstance(multi_tensor_triton.unscale_kernel, JITFunction)
    assert multi_tensor_triton.unscale_kernel is kernel


def test_interpreted_kernels_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with interpreted(cast_matmul_triton):
        assert main(["--quick"]) == 2
    assert "unset it" in capsys.readouterr().out
