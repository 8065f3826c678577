"""Compiled training steps on device ``cuda``: on a GPU, or on the stand-in for one, where values are not computed.

Each step is captured, run, and run twice more while nothing may make the host wait: on the stand-in a value that the
host reads does not exist, so a step that gets through is proved free of host reads.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu.chosen import STEPS
from gpu.harness import answer

from networks import NETWORKS

pytestmark = pytest.mark.gpu
LEVELS = ("O1", "O2", "O3", "auto", "torch")
#: dtypes and optimizers take turns: every network meets each, and so does every level
TURNS = ("fp16-adamw", "bf16-sgd", "bf16-adamw", "fp16-sgd")
EVERY = [
    f"{network}-{level}-{TURNS[(i + j) % 4]}" for i, network in enumerate(NETWORKS) for j, level in enumerate(LEVELS)
]


def is_fine(found: dict[str, Any], name: str) -> None:
    assert found["one_graph"] is not name.startswith("graph_break-")
    assert found["devices"] == ["cuda"]
    assert found["elsewhere"] == found["cpu"] == found["refused"] == []
    assert found["loss"] == "torch.float32"
    assert found["gradients"] == ["torch.float32 cuda"]
    assert "unscale_kernel" in found["launches"]  # the gradients, by our kernel


@pytest.mark.parametrize("name", STEPS)
def test_a_step_runs_on_the_device_alone(name: str) -> None:
    is_fine(answer("cases_steps", name), name)


@pytest.mark.zoo
@pytest.mark.parametrize("name", EVERY)
def test_every_network_and_level(name: str) -> None:
    is_fine(answer("cases_steps", name), name)


@pytest.mark.parametrize("name", ["fused", "clipped"])
def test_the_host_does_not_wait_in_a_step_with_a_fused_optimizer(name: str) -> None:
    assert answer("cases_steps", name) == ""


@pytest.mark.parametrize("name", ["unfused", "reads"])
def test_what_does_wait_is_noticed(name: str) -> None:
    """An optimizer that isn't fused asks the host whether to skip, and a model may read a value by itself."""
    assert answer("cases_steps", name)
