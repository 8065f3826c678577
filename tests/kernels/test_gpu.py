"""Which kernels a GPU gets; none is here, so torch's answers about it are made up."""

from __future__ import annotations

import pytest
import torch

from amp_compiler.kernels import gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def forget() -> None:
    gpu._can.cache_clear()


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_with_tensor_cores_for_bf16(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: object())
    assert gpu.uses_triton(CUDA) is expected
    monkeypatch.setenv(gpu.SETTING, "torch")
    assert not gpu.uses_triton(CUDA)


def test_without_triton_or_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not gpu.uses_triton(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert not gpu.uses_triton(CUDA)


def test_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu.SETTING, "cuda")
    with pytest.raises(ValueError, match="AMP_GPU_KERNELS='cuda' is not one of: triton, torch"):
        gpu.uses_triton(CUDA)
