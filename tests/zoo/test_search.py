"""A policy that was searched on a model of the zoo meets its tolerance on other data, with nearly everything low."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import Search, amp_compile, calibrate, search_policy
from zoo.models import VOCAB, ZOO

FIRST = 3  # the token that every sequence begins with
DECIBELS = 50  # fp32 has 100


def snr(model: Callable[..., Any], given: dict[str, Tensor]) -> Callable[[Callable[..., Any]], float]:
    """An ``evaluate``: the signal-to-noise ratio of the logits against fp32, in dB and at most 100."""
    with torch.no_grad():
        wanted = model(**given).logits.double()

    def evaluate(compiled: Callable[..., Any]) -> float:
        with torch.no_grad():
            noise = float((compiled(**given).logits.double() - wanted).square().sum())
        return min(10 * math.log10(float(wanted.square().sum()) / noise), 100.0) if noise else 100.0

    return evaluate


def searched(model: nn.Module, given: dict[str, Tensor], held_out: dict[str, Tensor]) -> Search:
    """Search where O3 fails, and check the result on data that the search has not seen."""
    model.eval()
    assert not snr(model, held_out)(amp_compile(model, level="O3", dtype=torch.float16)) > 20, "O3 fails"
    calibration = calibrate(model, [(given, None)])
    search = search_policy(model, snr(model, given), tolerance=100 - DECIBELS, calibration=calibration)
    found = amp_compile(model, policy=search.policy)
    assert snr(model, held_out)(found) >= DECIBELS
    assert found.report().low_flops_share >= 0.95
    assert search.complete
    return search


def ids(seed: int) -> dict[str, Tensor]:
    found = torch.randint(FIRST + 1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed))
    found[:, 0] = FIRST
    return {"input_ids": found}


@pytest.mark.zoo
def test_a_residual_network_whose_activations_overflow() -> None:
    """A convolution's results are beyond fp16, and the batch norm after it brings them back."""
    model, _ = ZOO["resnet"]()
    layer = model.get_submodule("resnet.encoder.stages.1.layers.0.layer.0")
    with torch.no_grad():
        layer.convolution.weight *= 1e6
        layer.normalization.running_mean *= 1e6
        layer.normalization.running_var *= 1e12
    pixels = torch.randn(2, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    search = searched(model, {"pixel_values": pixels[0]}, {"pixel_values": pixels[1]})
    assert {row.module for row in search.report().rows} == {
        f"resnet.encoder.stages.1.layers.0.layer.0.{name}" for name in ("convolution", "normalization")
    }
    assert search.evaluations <= 12


@pytest.mark.zoo
def test_a_network_of_depthwise_convolutions_that_overflow() -> None:
    """The layer norm after the convolution brings its results back."""
    model, _ = ZOO["convnext"](depths=[2, 2])
    layer = model.get_submodule("convnext.encoder.stages.1.layers.0")
    with torch.no_grad():
        layer.dwconv.weight *= 1e7
        layer.dwconv.bias *= 1e7
    pixels = torch.randn(2, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    search = searched(model, {"pixel_values": pixels[0]}, {"pixel_values": pixels[1]})
    assert {row.module for row in search.report().rows} == {
        f"convnext.encoder.stages.1.layers.0.{name}" for name in ("dwconv", "layernorm")
    }
    assert search.evaluations <= 12


@pytest.mark.zoo
def test_a_decoder_with_a_massive_activation() -> None:
    """One channel of the first token is 1e5 in all layers, as in language models that attend to their first token. The
    head is not tied to the embeddings here."""
    model, _ = ZOO["gpt2-sdpa"]()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.transformer.wte.weight[FIRST, 7] = 1e5
    search = searched(model, ids(0), ids(1))
    assert {row.op for row in search.report().rows} == {"add", "dropout", "layer_norm"}
    assert search.evaluations <= 30  # with eleven ops in fp32
