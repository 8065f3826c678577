"""Runs use the kernels that a CPU without low-precision units gets, on whatever CPU this is. Their graphs are verified
as users' are: the tests of steps verify them in depth."""

import pytest

from amp_compiler.kernels import cpu


@pytest.fixture(autouse=True)
def as_users_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.SETTING, "wide")
    monkeypatch.delenv("AMP_VERIFY", raising=False)
