"""What the tests of the GPU share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet_fakes() -> Iterator[None]:
    """torch logs every op that its fakes refuse."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    yield
    log.disabled = before
