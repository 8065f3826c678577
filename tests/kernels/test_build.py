"""The compiled kernels: built once, kept, and done without where that fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from amp_compiler.kernels import build


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a library that is not loaded into this process."""
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_take_over", lambda path: None)
    return tmp_path / "cache"


def build_again() -> build.Built:
    return build._load.__wrapped__()


def fake_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


#: writes its name to a file, and the library
GOOD = """echo run >> "$(dirname "$0")/runs"; while [ "$1" != -o ]; do shift; done; echo library > "$2\""""


def test_built_once(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(monkeypatch, tmp_path, GOOD)
    first, second = build_again(), build_again()
    assert first.loaded
    assert first == second
    assert (tmp_path / "runs").read_text() == "run\n"
    (library,) = fresh.glob("*.so")
    assert library.read_text() == "library\n"


def test_another_version_of_torch_builds_another(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(monkeypatch, tmp_path, GOOD)
    build_again()
    monkeypatch.setattr(build.torch, "__version__", "9.9")
    build_again()
    assert len(list(fresh.glob("*.so"))) == 2


def test_no_compiler_is_no_news(fresh: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    built = build_again()
    assert not built.loaded
    assert "no C++ compiler" in built.reason
    assert not recwarn.list
    assert not fresh.exists()


def test_a_compiler_that_fails_is_told_and_leaves_nothing(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(monkeypatch, tmp_path, "echo 'ops.cpp:3: fatal error: no such thing' >&2; exit 1")
    with pytest.warns(UserWarning, match="no such thing.*Python run instead.*AMP_CPU_KERNELS=python"):
        built = build_again()
    assert not built.loaded
    assert [p.name for p in fresh.iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(build.CACHE, str(tmp_path / "file" / "cache"))
    fake_compiler(monkeypatch, tmp_path, GOOD)
    with pytest.warns(UserWarning, match="could not be compiled"):
        assert not build_again().loaded


def test_a_library_that_cannot_be_loaded_leaves_the_kernels_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[str] = []
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_REGISTERED", {})
    monkeypatch.setattr(build, "_register", given_back.append)
    fake_compiler(monkeypatch, tmp_path, GOOD)
    with pytest.warns(UserWarning, match="could not be compiled"):
        assert not build_again().loaded
    assert {"cast_matmul", "wide_convolution"} <= set(given_back)


def test_a_compiler_that_hangs(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(monkeypatch, tmp_path, GOOD)

    def hang(*args: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("compiler", 1.0)

    monkeypatch.setattr(build.subprocess, "run", hang)
    with pytest.warns(UserWarning, match="timed out"):
        assert not build_again().loaded
