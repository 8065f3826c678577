"""fold_batch_norm: a batch norm goes into the layer before it, where that is the same function."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import Policy
from amp_compiler.common.errors import PipelineError
from amp_compiler.passes.fold_batch_norm import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from conversion_helpers import Weighted
from helpers import BF16, F16, context


def trained(model: nn.Module) -> nn.Module:
    """Statistics and scales as training leaves them, not 0 and 1."""
    torch.manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.normal_()
                assert module.running_var is not None
                module.running_var.uniform_(0.3, 3)
                if module.affine:
                    module.weight.uniform_(-2, 2)
                    module.bias.normal_()
    return model.eval()


def close(given: Weighted, before: Any) -> None:
    # fp32 sums of at most a few hundred products, in another order: 1e-5 of the values' size
    torch.testing.assert_close(given(), before, rtol=1e-5, atol=2e-5)


LAYERS: dict[str, tuple[nn.Module, nn.Module, tuple[int, ...]]] = {
    "conv1d": (nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), (2, 3, 9)),
    "conv2d without bias": (nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), (2, 3, 6, 6)),
    "conv2d, padding by name": (nn.Conv2d(3, 8, 3, padding="same"), nn.BatchNorm2d(8), (2, 3, 6, 6)),
    "conv2d, groups": (nn.Conv2d(4, 8, 3, groups=2, dilation=2), nn.BatchNorm2d(8), (2, 4, 7, 7)),
    "conv3d": (nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), (1, 2, 4, 4, 4)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), (2, 4, 4, 4)),
    "transposed, groups": (nn.ConvTranspose1d(4, 6, 3, groups=2), nn.BatchNorm1d(6), (2, 4, 5)),
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d(6), (3, 4)),
    "linear without bias": (nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), (3, 4)),
    "no scale": (nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), (3, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_the_same_function(name: str) -> None:
    layer, norm, shape = LAYERS[name]
    given = Weighted(trained(nn.Sequential(copy.deepcopy(layer), copy.deepcopy(norm))), torch.randn(shape))
    before = given()
    given.check(PASS, modified=True)
    assert "batch_norm" not in given.names()
    assert set(given.dtypes()) <= {"0.weight", "0.bias", "0.bias_folded", "0.weight_folded"}
    assert len(given.dtypes()) == 2
    close(given, before)


def test_the_graph_afterwards() -> None:
    model = trained(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    Weighted(model, torch.randn(3, 4)).check(PASS, """
        input p_0_weight: f32[6, 4]
        input p_0_bias_folded: f32[6]
        input input: f32[3, 4]
        linear: f32[3, 6] = linear(input, p_0_weight, p_0_bias_folded)
        return linear
    """)  # fmt: skip


class Twice(nn.Module):
    """The layer's result, or its weight, has another reader."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        if self.what == "result":
            return self.norm(y), y
        if self.what == "weight":
            return self.norm(y), x @ self.fc.weight
        return self.norm(y), x + self.fc.bias  # the bias


@pytest.mark.parametrize(("what", "folds"), [("result", False), ("weight", False), ("bias", True)])
def test_other_readers(what: str, folds: bool) -> None:
    given = Weighted(trained(Twice(what)), torch.randn(3, 4))
    before = given()
    given.check(PASS, modified=folds)
    close(given, before)


NEAR: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "own statistics": (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False)), (3, 4)),
    "channels elsewhere": (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5)), (3, 5, 4)),
    "something between": (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6)), (3, 4)),
    "norm first": (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6)), (3, 4)),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_stays(name: str) -> None:
    model, shape = NEAR[name]
    Weighted(trained(copy.deepcopy(model)), torch.randn(shape)).check(PASS, modified=False)


def test_a_chain_of_layers_folds_into_each() -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 4, 3),
                                  nn.BatchNorm2d(4), nn.ReLU(True)))  # fmt: skip
    given = Weighted(model, torch.randn(1, 3, 8, 8))
    before = given()
    given.check(PASS)
    assert given.names() == ["conv2d", "relu_", "conv2d", "relu_"]
    close(given, before)


@pytest.mark.parametrize(("variance", "low", "folds"), [(1e-12, F16, False), (1e-12, BF16, True), (1e12, F16, False)])
def test_weights_that_the_low_dtype_would_hold_badly_stay(variance: float, low: torch.dtype, folds: bool) -> None:
    model = trained(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, eps=0)))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].running_var.fill_(variance)
    Weighted(model, torch.randn(3, 4), dtype=low).check(PASS, modified=folds)


def test_a_rule_for_the_norm_alone_is_honoured() -> None:
    model = trained(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    rule = Policy("O2", BF16).with_modules({"1": "float32"})
    Weighted(model, torch.randn(3, 4), policy=rule).check(PASS, modified=False)
    both = Policy("O2", BF16).with_modules({"*": "float32"})
    Weighted(model, torch.randn(3, 4), policy=both).check(PASS, modified=True)


@pytest.mark.parametrize("policy", [Policy("O0", BF16), Policy.torch("cpu", BF16)])
def test_what_must_stay_as_it_is_stays(policy: Policy) -> None:
    model = trained(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    Weighted(model, torch.randn(3, 4), policy=policy).check(PASS, modified=False)


def test_without_weights_it_does_nothing() -> None:
    given = Weighted(trained(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))), torch.randn(3, 4))
    assert PASS.run(given.gm, context()) is False


def test_it_needs_a_normalized_graph() -> None:
    with pytest.raises(PipelineError, match="needs 'normalized'"):
        Pipeline((PASS,), (facts.CAPTURED,))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.booleans())
@settings(max_examples=8)
def test_any_sizes(inner: int, outer: int, groups: int, transposed: bool, bias: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(inner * groups, outer * groups, 2, groups=groups, bias=bias)
    model = trained(nn.Sequential(layer, nn.BatchNorm2d(outer * groups)))
    given = Weighted(model, torch.randn(2, inner * groups, 4, 4))
    before = given()
    given.check(PASS, modified=True)
    close(given, before)
