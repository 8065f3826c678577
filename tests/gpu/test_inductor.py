"""Inductor's code for a GPU: every rounding that the graph asks for is in its kernels, and they compile for real GPUs."""

from __future__ import annotations

import pytest
from gpu.harness import results, value

NAMES = [f"{model} {low}" for model in ("chain", "norm") for low in ("fp16", "bf16")]


@pytest.mark.gpu
@pytest.mark.zoo
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_step_keeps_its_roundings(name: str) -> None:
    found = value(results("cases_inductor", NAMES), name)
    assert found["one_graph"]
    assert found["launched"]
    assert found["failed"] == {}
    assert found["roundings"] >= found["low_ops"] > 0
