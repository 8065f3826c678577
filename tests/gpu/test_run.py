"""``make test-gpu`` says what is missing, and writes one file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu import run


def test_a_machine_without_a_gpu_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert run.main([]) == 2
    said = capsys.readouterr().out
    assert "is built for CPUs: install the build for your GPU" in said
    assert "docs/gpu.md" in said


def test_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert [line.split(":")[0] for line in run.missing()] == ["torch finds no GPU", "Triton is not installed"]


def test_one_file_with_every_test_and_what_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def tests(arguments: list[str], plugins: list[run.Noting]) -> int:
        assert arguments[:2] == ["-m", "gpu"]
        for outcome, words in (("passed", ""), ("failed", "these bits differ")):
            plugins[0].pytest_runtest_logreport(SimpleNamespace(
                when="call", outcome=outcome, failed=outcome == "failed", duration=1.0, nodeid=f"test_{outcome}",
                longreprtext=words,
            ))  # type: ignore[arg-type]  # fmt: skip
        return 1

    monkeypatch.setattr(run.pytest, "main", tests)
    monkeypatch.setattr(run, "missing", list)
    monkeypatch.setattr(run, "doctor", lambda: "2 cores")
    assert run.main(["--out", str(tmp_path / "found" / "results.txt")]) == 1
    text = (tmp_path / "found" / "results.txt").read_text()
    assert f"torch {torch.__version__}" in text
    assert "2 cores" in text
    assert "passed       1.00 s  test_passed" in text
    assert text.count("test_failed") == 2
    assert "these bits differ" in text
