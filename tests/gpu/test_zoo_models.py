"""The models of the zoo on device ``cuda``, a whole training step each: every graph fits the device."""

from __future__ import annotations

import pytest
from gpu.harness import answer

from zoo.models import ZOO

LEVELS, LOW = ("O1", "O2", "auto"), ("fp16", "bf16")


@pytest.mark.gpu
@pytest.mark.zoo
@pytest.mark.parametrize("name", ZOO)
def test_a_model_on_the_device(name: str) -> None:
    """Levels and dtypes take turns."""
    place = list(ZOO).index(name)
    found = answer("cases_zoo", f"{name} {LEVELS[place % 3]} {LOW[place // 3 % 2]}")
    if "stops" in found:
        pytest.skip(f"the stand-in for a GPU has no value for {found['stops']}")
    assert found["graphs"]
    assert found["devices"] == ["cuda"]
    assert found["gradients"] == ["torch.float32"]
    assert found["elsewhere"] == found["cpu"] == found["refused"] == []
    assert not (found["one_graph"] and found["waits"])
