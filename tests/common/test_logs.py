"""``AMP_LOGS``: topics on stderr, and loggers that an application can listen to."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from amp_compiler import amp_compile
from amp_compiler.common.logs import TOPICS, log, wants


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.name}: {record.getMessage()}")


def test_an_application_listens() -> None:
    logger, listener = logging.getLogger("amp_compiler"), Listener()
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        amp_compile(nn.Linear(4, 2), dtype=torch.bfloat16, backend="eager")(torch.ones(3, 4))
    finally:
        logger.removeHandler(listener)
        logger.setLevel(logging.NOTSET)
    assert any(text.startswith("amp_compiler.passes: forward insert_casts:") for text in listener.said)
    assert any(text.startswith("amp_compiler.capture: Dynamo: graph 0") for text in listener.said)
    assert sum(text.startswith("amp_compiler.casts: + ") for text in listener.said) >= 3


def test_nothing_is_said_unasked(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMP_LOGS", raising=False)
    for topic in TOPICS:
        log(topic, "quiet")
        assert not wants(topic)
    assert capfd.readouterr().err == ""


def test_an_unknown_topic_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_LOGS", "capture-typo")
    with pytest.raises(ValueError, match=r"'capture-typo' is not one of: passes, casts, capture, all, quiet\."):
        wants("capture")


def test_quiet_is_no_topic_and_no_mistake(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AMP_LOGS", "quiet")
    assert not wants("capture")
    assert not recwarn.list
    assert capfd.readouterr().err == ""
