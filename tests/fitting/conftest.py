"""Runs use the kernels that a CPU without low-precision units gets, on whatever CPU this is."""

import pytest

from amp_compiler.kernels import cpu


@pytest.fixture(autouse=True)
def wide_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.SETTING, "wide")
