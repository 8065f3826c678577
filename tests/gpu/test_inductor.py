"""Inductor's code for a GPU: its kernels have every rounding that the graph asks for, and compile for real GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.chosen import INDUCTOR
from gpu.harness import answer

pytestmark = pytest.mark.gpu
NAMES = [f"{model} {low}" for model in ("chain", "norm", "attention", "convolution") for low in ("fp16", "bf16")]


@pytest.mark.parametrize("name", INDUCTOR)
def test_a_whole_step_keeps_its_roundings(name: str) -> None:
    is_fine(answer("cases_inductor", name))


@pytest.mark.zoo
@pytest.mark.parametrize("name", NAMES)
def test_every_step_keeps_its_roundings(name: str) -> None:
    is_fine(answer("cases_inductor", name))


def is_fine(found: dict[str, Any]) -> None:
    assert found["one_graph"]
    assert found["launched"]
    assert found["failed"] == {}
    assert found["roundings"] >= found["low_ops"] > 0
