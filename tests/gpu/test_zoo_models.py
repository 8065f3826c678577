"""The models of the zoo on device ``cuda``, forward and backward: every graph fits the device."""

from __future__ import annotations

import pytest
from gpu.harness import results, value

from zoo.models import ZOO


@pytest.mark.gpu
@pytest.mark.zoo
@pytest.mark.parametrize("name", ZOO)
def test_a_model_on_the_device(name: str) -> None:
    names = [f"{name} {level} {low}" for level in ("O1", "O2", "auto") for low in ("fp16", "bf16")]
    answers = results("cases_zoo", names)
    found = {case: value(answers, case) for case in names}
    if stops := sorted({one["stops"] for one in found.values() if "stops" in one}):
        pytest.skip(f"the stand-in for a GPU has no value for {', '.join(stops)}")
    for one in found.values():
        assert one["graphs"]
        assert one["devices"] == ["cuda"]
        assert one["gradients"] == ["torch.float32"]
        assert one["elsewhere"] == one["cpu"] == one["refused"] == []
