"""Compiled training steps on device ``cuda``: on a GPU, or on the stand-in for one, where values are not computed.

Each step is captured, run, and run twice more while nothing may make the host wait: on the stand-in a value that the
host reads does not exist, so a step that gets through is proved free of host reads.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu.harness import results, value

from networks import NETWORKS

pytestmark = pytest.mark.gpu
LEVELS, LOW, OPTIMIZERS = ("O1", "O2", "O3", "auto", "torch"), ("fp16", "bf16"), ("adamw", "sgd")
#: every level, dtype and optimizer once, every kind of layer; the whole matrix is marked zoo
CHOSEN = ("dense-O2-fp16-adamw", "conv_bn-O1-bf16-sgd", "masked_attention-torch-fp16-sgd", "unet-auto-fp16-adamw",
          "embedding-O3-bf16-adamw", "shared_weights-O2-fp16-sgd")  # fmt: skip
WAITS = ("fused", "clipped", "unfused", "reads")
EVERY = [f"{n}-{a}-{b}-{c}" for n in NETWORKS for a in LEVELS for b in LOW for c in OPTIMIZERS]


def is_fine(answer: dict[str, Any], name: str) -> None:
    assert answer["one_graph"] is not name.startswith("graph_break-")
    assert answer["devices"] == ["cuda"]
    assert answer["elsewhere"] == answer["cpu"] == answer["refused"] == []
    assert answer["loss"] == "torch.float32"
    assert answer["gradients"] == ["torch.float32 cuda"]
    assert "unscale_kernel" in answer["launches"]  # the gradients, by our kernel


@pytest.mark.parametrize("name", CHOSEN)
def test_a_step_runs_on_the_device_alone(name: str) -> None:
    is_fine(value(results("cases_steps", (*CHOSEN, *WAITS)), name), name)


@pytest.mark.zoo
@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_level_dtype_and_optimizer(network: str) -> None:
    names = [name for name in EVERY if name.startswith(f"{network}-")]
    answers = results("cases_steps", names)
    for name in names:
        is_fine(value(answers, name), name)


@pytest.mark.parametrize("name", ["fused", "clipped"])
def test_the_host_does_not_wait_in_a_step_with_a_fused_optimizer(name: str) -> None:
    assert value(results("cases_steps", (*CHOSEN, *WAITS)), name) == ""


@pytest.mark.parametrize("name", ["unfused", "reads"])
def test_what_does_wait_is_noticed(name: str) -> None:
    """An optimizer that isn't fused asks the host whether to skip, and a model may read a value by itself."""
    assert value(results("cases_steps", (*CHOSEN, *WAITS)), name)
