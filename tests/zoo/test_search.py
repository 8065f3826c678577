"""A policy that was searched on a model of the zoo meets its tolerance on other data, with nearly everything low."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from amp_compiler import amp_compile, calibrate, search_policy
from zoo.models import ZOO


def snr(model: Callable[..., Any], pixels: torch.Tensor) -> Callable[[Callable[..., Any]], float]:
    """An ``evaluate``: the signal-to-noise ratio of the logits against fp32, in dB and at most 100."""
    with torch.no_grad():
        wanted = model(pixel_values=pixels).logits.double()

    def evaluate(compiled: Callable[..., Any]) -> float:
        with torch.no_grad():
            noise = float((compiled(pixel_values=pixels).logits.double() - wanted).square().sum())
        return min(10 * math.log10(float(wanted.square().sum()) / noise), 100.0) if noise else 100.0

    return evaluate


@pytest.mark.zoo
def test_a_residual_network_whose_activations_overflow() -> None:
    """A convolution's results are beyond fp16, and the batch norm after it brings them back: O3 fails."""
    model, _ = ZOO["resnet"]()
    model.eval()
    layer = model.get_submodule("resnet.encoder.stages.1.layers.0.layer.0")
    with torch.no_grad():
        layer.convolution.weight *= 1e6
        layer.normalization.running_mean *= 1e6
        layer.normalization.running_var *= 1e12
    generator = torch.Generator().manual_seed(0)
    pixels, held_out = torch.randn(2, 2, 3, 32, 32, generator=generator)
    assert not snr(model, held_out)(amp_compile(model, level="O3", dtype=torch.float16)) > 20
    calibration = calibrate(model, [({"pixel_values": pixels}, None)])
    search = search_policy(model, snr(model, pixels), tolerance=50, calibration=calibration)
    found = amp_compile(model, policy=search.policy)
    assert snr(model, held_out)(found) >= 50
    assert found.report().low_flops_share >= 0.95
    assert {row.module for row in search.report().rows} == {
        f"resnet.encoder.stages.1.layers.0.layer.0.{name}" for name in ("convolution", "normalization")
    }
    assert search.evaluations <= 12
