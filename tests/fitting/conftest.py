"""Runs use the kernels that a CPU without low-precision units gets, on whatever CPU this is. Their graphs are verified
as users' are: the tests of steps verify them in depth."""

import signal
from collections.abc import Iterator

import pytest

from amp_compiler.kernels import cpu


@pytest.fixture(autouse=True)
def as_users_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.SETTING, "wide")
    monkeypatch.delenv("AMP_VERIFY", raising=False)


@pytest.fixture(autouse=True)
def _ctrl_c_raises() -> Iterator[None]:
    """A shell that starts the tests in the background has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
