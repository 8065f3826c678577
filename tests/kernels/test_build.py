"""The compiled kernels: built once, kept, and done without where that fails."""

from __future__ import annotations

import fcntl
import functools
import io
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_compiler.kernels import build, capability, compile_cpp, registry


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a library that is not loaded into this process."""
    monkeypatch.delenv("AMP_LOGS", raising=False)
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "lib")
    monkeypatch.setattr(registry, "take_over", lambda path: None)
    return tmp_path / "cache"


def build_again() -> build.Built:
    return build._prepare.__wrapped__()


def fake_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


#: a file that looks like a library, and is none of ours
PROGRAM = Path(shutil.which("true") or "/bin/true").resolve()
#: writes a line to a file when it links, and whatever it is asked for
GOOD = f"""case "$*" in *-ltorch_cpu*) echo run >> "$(dirname "$0")/runs";; esac
while [ "$1" != -o ]; do shift; done; cp {PROGRAM} "$2\""""


def test_built_once(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(monkeypatch, tmp_path, GOOD)
    first, second = build_again(), build_again()
    assert first.loaded
    assert first == second
    assert (tmp_path / "runs").read_text() == "run\n"
    (library,) = fresh.glob("*.so")
    assert library.read_bytes() == PROGRAM.read_bytes()
    assert {file.name for file in fresh.iterdir()} == {library.name, "lock"}, "nothing else is left"


def test_another_source_builds_another(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(monkeypatch, tmp_path, GOOD)
    build_again()
    shutil.copytree(compile_cpp.SOURCES, tmp_path / "cpp")
    monkeypatch.setattr(compile_cpp, "SOURCES", tmp_path / "cpp")
    build_again()
    assert len(list(fresh.glob("*.so"))) == 1
    (tmp_path / "cpp" / "ops.h").write_text("// changed\n")
    build_again()
    assert len(list(fresh.glob("*.so"))) == 2


def test_a_library_that_was_cut_short_is_compiled_again(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load it could end the process."""
    fake_compiler(monkeypatch, tmp_path, GOOD)
    build_again()
    (library,) = fresh.glob("*.so")
    for kept in (0, 3, 63, 64, PROGRAM.stat().st_size - 1):
        library.write_bytes(PROGRAM.read_bytes()[:kept])
        assert build_again().loaded
        assert library.read_bytes() == PROGRAM.read_bytes()


def test_the_library_of_a_wheel_needs_no_compiler(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compile_cpp.shutil, "which", lambda name: None)
    build.PACKAGED.mkdir()
    for kind in ("avx2", "avx512"):
        shutil.copy(PROGRAM, build.PACKAGED / compile_cpp.library_name(kind))
    built = build_again()
    assert built.loaded
    assert built.reason == f"compiled: {build.PACKAGED / compile_cpp.library_name(capability.kernel_kind() or '')}"
    assert not fresh.exists()
    assert capfd.readouterr().err == ""


def test_a_library_of_a_wheel_that_cannot_be_loaded(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(f"{path}: undefined symbol: torch_parallel_for")

    monkeypatch.setattr(registry, "take_over", refuse)
    build.PACKAGED.mkdir()
    shutil.copy(PROGRAM, build.PACKAGED / compile_cpp.library_name(capability.kernel_kind() or ""))
    with pytest.warns(UserWarning, match=r"cannot be loaded: .*undefined symbol.*Install the package again"):
        assert not build_again().loaded


def test_a_cpu_without_avx2_runs_the_kernels_in_python(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv(capability.SETTING, "baseline")
    assert build_again() == build.Built(
        False, "the kernels in Python: the compiled ones need AVX2, which AMP_CPU_CAPABILITY=baseline forbids"
    )
    monkeypatch.delenv(capability.SETTING)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx2": False})
    assert build_again().reason.endswith("the compiled ones need AVX2, which this CPU does not have")
    assert not recwarn.list
    assert not fresh.exists()


def test_the_declarations_are_those_of_torch(tmp_path: Path) -> None:
    """``torch_c.h`` beside torch's headers: another type of an argument would be an error."""
    compiler = compile_cpp.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    both = tmp_path / "both.cpp"
    both.write_text(
        "#include <torch/csrc/stable/c/shim.h>\n#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>\n"
        f'#include "{compile_cpp.SOURCES / "torch_c.h"}"\n'
    )
    include = Path(torch.__file__).parent / "include"
    command = [*shlex.split(compiler), "-std=c++20", "-fsyntax-only", f"-I{include}", str(both)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheel is for x86-64")
def test_a_wheel_runs_where_torch_does() -> None:
    """torch's wheels are manylinux_2_28. The library needs no newer C or C++ library: some calls of the standard
    library are functions of a newer one, depending on what the compiler can prove."""
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
    built = build.prepare()
    if not built.loaded:
        pytest.skip(f"no compiled kernels here: {built.reason}")
    (library,) = registry._LOADED
    names = set(re.findall(rb"\b(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)", library.read_bytes()))
    assert names
    for name, version in names:
        numbers = tuple(int(number) for number in version.split(b"."))
        assert numbers <= newest[name.decode()], (name, version)


def test_no_compiler_is_no_news(fresh: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compile_cpp.shutil, "which", lambda name: None)
    built = build_again()
    assert not built.loaded
    assert "no C++ compiler" in built.reason
    assert not recwarn.list
    assert not fresh.exists()


def test_a_compiler_that_fails_is_told_and_leaves_nothing(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(monkeypatch, tmp_path, "echo 'ops.cpp:3: fatal error: no such thing' >&2; exit 1")
    advice = r"no such thing\. The same kernels in Python.*apt install g\+\+.*CXX=.*AMP_CPU_KERNELS=python"
    with pytest.warns(UserWarning, match=advice):
        built = build_again()
    assert not built.loaded
    assert [p.name for p in fresh.iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(build.CACHE, str(tmp_path / "file" / "cache"))
    fake_compiler(monkeypatch, tmp_path, GOOD)
    with pytest.warns(UserWarning, match="could not be compiled.*Set AMP_CACHE_DIR to a writable folder"):
        assert not build_again().loaded


def test_a_compiler_that_is_not_there(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.warns(UserWarning, match=r"by /no/such/compiler: .*No such file.*apt install g\+\+"):
        assert not build_again().loaded


def test_a_compiler_with_arguments(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As people set it: ``CXX="ccache g++"``."""
    fake_compiler(monkeypatch, tmp_path, GOOD)
    monkeypatch.setenv("CXX", f"/bin/sh {tmp_path / 'compiler'}")
    assert build_again().loaded


def test_a_library_that_cannot_be_loaded_leaves_the_kernels_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[str] = []
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "lib")
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_register", given_back.append)
    fake_compiler(monkeypatch, tmp_path, GOOD)
    with pytest.warns(UserWarning, match=r"cannot be loaded.*Delete .*cpu_kernels_\w+\.so, so that"):
        assert not build_again().loaded
    assert {"cast_matmul", "wide_convolution"} <= set(given_back)


def test_a_compiler_that_hangs(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(monkeypatch, tmp_path, GOOD)

    def hang(*args: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("compiler", 1.0)

    monkeypatch.setattr(build.subprocess, "run", hang)
    with pytest.warns(UserWarning, match="timed out"):
        assert not build_again().loaded


# ------------------------------------------------------------------------------------------ while it is installed


def install_editable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the part of setup.py that an editable install runs, without copying modules."""
    setuptools = pytest.importorskip("setuptools", reason="an installation needs setuptools")
    asked: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(setuptools, "setup", asked.update)
        patch.setattr("setuptools.command.build_py.build_py.run", lambda self: None)
        runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))
        command = asked["cmdclass"]["build_py"](asked["distclass"]())
        command.editable_mode = True
        command.run()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="libraries are made for x86-64")
def test_an_editable_install_compiles_what_the_first_call_needs(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(capability.SETTING, raising=False)
    monkeypatch.delenv("AMP_BUILD_KERNELS", raising=False)
    fake_compiler(monkeypatch, tmp_path, GOOD)
    install_editable(monkeypatch)
    assert [file.name for file in fresh.iterdir()] == [compile_cpp.library_name(capability.kernel_kind() or "")]
    assert build_again().loaded
    install_editable(monkeypatch)
    assert (tmp_path / "runs").read_text() == "run\n", "compiled once"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("fault", ["compiler", "folder", "asked not to"])
def test_an_install_never_fails_because_of_the_kernels(
    fault: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(monkeypatch, tmp_path, "echo broken >&2; exit 1" if fault == "compiler" else GOOD)
    monkeypatch.setenv("AMP_BUILD_KERNELS", "0" if fault == "asked not to" else "auto")
    if fault == "folder":
        (tmp_path / "cache").write_text("")
    install_editable(monkeypatch)
    assert not list(tmp_path.glob("cache/*.so"))


# ------------------------------------------------------------------------------------- what is told meanwhile


def test_a_line_before_and_a_line_after(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_compiler(monkeypatch, tmp_path, GOOD)
    build_again()
    out, err = capfd.readouterr()
    before, after = err.splitlines()
    assert re.match(r"amp_compiler: compiling CPU kernels, once per machine, about \d+ s .*AMP_LOGS=quiet", before)
    assert re.match(r"amp_compiler: compiled CPU kernels in \d+\.\d s; they are kept in .*cache$", after)
    assert out == ""
    build_again()
    assert capfd.readouterr().err == "", "the cache is warm"


def test_the_first_line_comes_before_the_compiler_runs(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_compiler(monkeypatch, tmp_path, "exit 1")
    with pytest.warns(UserWarning, match="could not be compiled"):
        build_again()
    assert capfd.readouterr().err.startswith("amp_compiler: compiling CPU kernels")


@pytest.mark.parametrize("setting", ["quiet", "QUIET", "passes, quiet"])
def test_quiet(
    setting: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AMP_LOGS", setting)
    fake_compiler(monkeypatch, tmp_path, GOOD)
    assert build_again().loaded
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_without_a_stderr(stderr: str | None, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under pythonw, or in a daemon."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if stderr is None else closed)
    fake_compiler(monkeypatch, tmp_path, GOOD)
    assert build_again().loaded


def test_threads_that_come_together_compile_once(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_compiler(monkeypatch, tmp_path, f"sleep 0.2; {GOOD}")
    monkeypatch.setattr(build, "_prepare", functools.cache(build._prepare.__wrapped__))
    taken: list[Path] = []
    monkeypatch.setattr(registry, "take_over", taken.append)
    found: list[build.Built] = []
    threads = [threading.Thread(target=lambda: found.append(build.prepare())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [built.loaded for built in found] == [True] * 4
    assert (tmp_path / "runs").read_text() == "run\n"
    assert len(taken) == 1
    assert len(capfd.readouterr().err.splitlines()) == 2


class Listening(io.StringIO):
    """A stderr that says when something is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()

    def write(self, text: str) -> int:
        self.heard.set()
        return super().write(text)


def test_a_process_waits_for_another_that_compiles(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is this test, which holds the lock."""
    fake_compiler(monkeypatch, tmp_path, GOOD)
    library = Path(build_again().reason.removeprefix("compiled: "))
    library.unlink()
    (tmp_path / "runs").unlink()
    listening = Listening()
    monkeypatch.setattr(sys, "stderr", listening)
    found: list[build.Built] = []
    with open(fresh / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: found.append(build_again()))
        waiting.start()
        assert listening.heard.wait(20)
        shutil.copy(PROGRAM, library)
    waiting.join(20)
    assert found[0].loaded
    assert listening.getvalue() == "amp_compiler: waiting for another process, which is compiling CPU kernels ...\n"
    assert not (tmp_path / "runs").exists(), "compiled once"


def test_a_file_system_that_cannot_lock(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    fake_compiler(monkeypatch, tmp_path, GOOD)
    assert build_again().loaded
