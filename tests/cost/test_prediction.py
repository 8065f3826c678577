"""``predict``: whole models, from shapes alone."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import ArgumentError, CaptureError, Policy, Prediction, predict
from amp_compiler.cost.devices import Device, find
from amp_compiler.cost.products import products
from amp_compiler.inspect.render.roofline import svg
from amp_compiler.prediction import predict_study

DEVICE = "v100_sxm2"


def layers(width: int, batch: int, device: str = "meta") -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        return model, (torch.empty(batch, width),)


@pytest.fixture(scope="module")
def large() -> Prediction:
    model, args = layers(4096, 2048)
    return predict(model, args, device=DEVICE, optimizer="sgd")


@pytest.fixture(scope="module")
def small() -> Prediction:
    model, args = layers(8, 4)
    return predict(model, args, device=DEVICE)


def test_large_products_pay(large: Prediction) -> None:
    assert 4 < large.speedup < 8
    assert large.pays
    assert large.speedup == pytest.approx(large.fp32_seconds / large.seconds)
    assert large.band[0] < large.speedup < large.band[1]
    assert large.bound == "compute"
    assert sum(large.breakdown.values()) == pytest.approx(large.seconds)
    assert sum(large.fp32_breakdown.values()) == pytest.approx(large.fp32_seconds)
    assert large.breakdown["casts"] > 0 == large.fp32_breakdown["casts"]
    assert large.pays_from == 2048
    assert "pays" not in str(large)
    assert "times as fast as fp32" in str(large)


def test_work_of_a_training_step(large: Prediction) -> None:
    """Forward, two gradients for the second layer, one for the first, whose input needs none."""
    product = 2 * 2048 * 4096 * 4096
    assert sum(k.flops for k in large.low.graph.kernels) == 5 * product
    assert all(k.unit == "fp16" for k in large.low.graph.kernels if k.flops)


def test_small_models_wait_for_the_host(small: Prediction) -> None:
    assert not small.pays
    assert small.bound == "launch"
    assert "waiting for the host" in small.reason
    assert small.band[0] < small.speedup


def test_a_batch_from_which_it_pays() -> None:
    model, args = layers(2048, 32)
    found = predict(model, args, device=DEVICE, training=False)
    assert not found.pays
    assert found.pays_from in (256, 2048)
    larger = predict(model, (torch.empty(found.pays_from or 0, 2048, device="meta"),), device=DEVICE, training=False)
    assert larger.pays


def test_baselines(large: Prediction) -> None:
    assert large.baseline == "fp32"
    assert large.strict_fp32_seconds == large.fp32_seconds
    on_a100 = predict_study(large.study, find("a100_80"))
    assert on_a100.baseline == "tf32"
    assert on_a100.strict_fp32_seconds > 3 * on_a100.fp32_seconds
    assert 1 < on_a100.speedup < 3


def test_it_is_the_same_for_real_weights_and_leaves_them_alone(small: Prediction) -> None:
    model, args = layers(8, 4, "cpu")
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = predict(model, args, device=DEVICE)
    assert found.seconds == small.seconds
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())


def test_a_model_made_under_fakes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, args = layers(8, 4, "cpu")
    assert predict(model, args, device=DEVICE).seconds > 0


def test_shared_weights_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.tokens(ids)), ids)

    with torch.device("meta"):
        model, ids = Tied(), torch.zeros(16, dtype=torch.int64)
    found = predict(model, (ids,), device=DEVICE)
    assert found.study.parameters == 64_000


def test_a_convolution_and_its_backward_do_the_same_work_each() -> None:
    with torch.device("meta"):
        conv, x = nn.Conv2d(8, 16, 3, padding=1), torch.empty(2, 8, 10, 10, requires_grad=True)
    found = predict(conv, (x,), device=DEVICE)
    graph = found.study.graph(False)
    flops = [p.flops for node in graph.graph.nodes for p in products(node)]
    assert flops == [2 * 2 * 16 * 100 * 8 * 9] * 3


def test_attention_is_one_kernel_and_dropout_inside_it_costs_nothing() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)

    q = torch.empty(2, 4, 64, 32, device="meta", requires_grad=True)
    found = predict(Attention(), (q,), device=DEVICE)
    heavy = [k for k in found.low.graph.kernels if k.flops]
    assert [k.backward for k in heavy] == [False, True]
    assert heavy[1].flops == 2.5 * heavy[0].flops == 2.5 * 4 * 8 * 64 * 64 * 32


def test_the_optimizer_and_the_scale_are_counted() -> None:
    model, args = layers(512, 4)
    study = predict(model, args, device=DEVICE, optimizer="none").study
    parameters = 2 * (512 * 512 + 512)
    seconds = {}
    for name in ("none", "sgd", "adamw"):
        study.optimizer = name
        seconds[name] = predict_study(study, find(DEVICE)).breakdown["optimizer"]
    assert seconds["none"] == pytest.approx(8 * parameters / 900e9), "gradients are unscaled"
    assert seconds["sgd"] - seconds["none"] == pytest.approx(12 * parameters / 900e9)
    assert seconds["adamw"] - seconds["none"] == pytest.approx(28 * parameters / 900e9)


def test_gradients_of_several_processes_go_over_the_link(large: Prediction) -> None:
    slow = dataclasses.replace(find(DEVICE), link=1e9)
    model, args = layers(4096, 8)
    alone = predict(model, args, device=slow)
    four = predict(model, args, device=slow, world_size=4)
    moved = 2 * 3 / 4 * 4 * alone.study.parameters / 1e9
    assert alone.breakdown["communication"] == 0
    assert four.breakdown["communication"] == pytest.approx(moved - four.low.graph.backward)
    assert abs(four.speedup - 1) < abs(alone.speedup - 1), "both sides wait for it"


def test_inductor_moves_fewer_bytes() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.sin() * 2 + 1).exp()

    x = torch.empty(1 << 20, device="meta")
    eager, fused = (predict(Chain(), (x,), device=DEVICE, training=False, backend=b) for b in ("eager", "inductor"))
    assert fused.fp32_seconds < eager.fp32_seconds / 2
    assert fused.fp32_memory < eager.fp32_memory
    assert "no matrix product" in fused.reason


def test_low_precision_saves_memory() -> None:
    model, args = layers(512, 8192)
    found = predict(model, args, device=DEVICE, training=False)
    assert found.fp32_memory > 3 * 8192 * 512 * 4
    assert found.memory < found.fp32_memory


def test_a_size_that_depends_on_data_is_told() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)[x[:, 0] > 0]

    found = predict(Picks(), (torch.ones(4, 8),), device=DEVICE, training=False)
    assert any("depends on the data" in note and "counts as 1" in note for note in found.notes)


def test_a_dtype_without_units_is_told(large: Prediction) -> None:
    model, args = layers(8, 4)
    found = predict(model, args, device=DEVICE, dtype="bfloat16", training=False)
    assert any("has no bfloat16 units" in note for note in found.notes)


def test_json(small: Prediction) -> None:
    told = json.loads(json.dumps(small.to_json()))
    assert told["speedup"] == small.speedup
    assert told["device"] == DEVICE
    assert told["breakdown"] == small.breakdown


def test_a_roofline(large: Prediction) -> None:
    from xml.etree import ElementTree

    picture = svg(large.device, {"O2 <low>": large.low.graph})
    root = ElementTree.fromstring(picture)
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(circles) == 5
    assert "fp16" in picture


@pytest.mark.parametrize(("change", "message"), [
    ({"device": "v1000"}, "Unknown device"),
    ({"level": "O9"}, "O9"),
    ({"optimizer": "adam"}, "Unknown optimizer 'adam'.*adamw"),
    ({"world_size": 0}, "world_size"),
    ({"backend": "triton"}, "Unknown backend"),
    ({"dtype": "int8"}, "dtype must be"),
    ({"args": torch.ones(4, 8)}, "args must be a tuple"),
    ({"policy": "O2"}, "policy must be"),
])  # fmt: skip
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    model, args = layers(8, 4)
    with pytest.raises(ArgumentError, match=message):
        predict(model, **{"args": args, "device": DEVICE, **change})


def test_a_model_that_cannot_be_captured() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="cannot be exported"):
        predict(Branches(), (torch.ones(4),), device=DEVICE)
    with pytest.raises(ArgumentError, match=r"torch\.nn\.Module"):
        predict(torch.relu, (torch.ones(4),), device=DEVICE)  # type: ignore[arg-type]


def test_a_policy() -> None:
    model, args = layers(2048, 512)
    low, fp32 = (predict(model, args, device=DEVICE, policy=Policy("O2", torch.float16).with_ops(**lists))
                 for lists in ({}, {"fp32": ["linear"]}))  # fmt: skip
    assert 0.8 < fp32.speedup <= 1 < low.speedup


@given(st.floats(1.0, 8.0), st.sampled_from(["fp16", "bandwidth", "host"]))
@settings(max_examples=30, deadline=None)
def test_a_better_device_is_never_slower(large: Prediction, times: float, what: str) -> None:
    old = find(DEVICE)
    better: Device
    if what == "fp16":
        better = dataclasses.replace(old, peak={**old.peak, "fp16": old.peak["fp16"] * times})
    elif what == "bandwidth":
        better = dataclasses.replace(old, bandwidth=old.bandwidth * times)
    else:
        better = dataclasses.replace(old, host=old.host / times)
    assert predict_study(large.study, better).seconds <= large.seconds * (1 + 1e-9)
