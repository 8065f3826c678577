"""``AmpPrecision`` in Lightning's Fabric."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from integrations.lightning_modules import Small, adamw, inputs
from integrations.trainer_loops import own_loop
from lightning.fabric import Fabric
from torch import Tensor, nn

from amp_compiler import ArgumentError, DynamicLossScaler, amp_compile
from amp_compiler.integrations.lightning import AmpPrecision


def make_fabric(precision: AmpPrecision) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, plugins=precision)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2

    def energy(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def test_steps_equal_our_own_loop_bit_for_bit() -> None:
    batches, losses = [(x, torch.tensor([0, 1, 1])) for x in inputs(12)], []
    fabric, given = make_fabric(precision := AmpPrecision(dtype="float16")), Net()
    model, optimizer = fabric.setup(given, torch.optim.AdamW(given.parameters(), 1e-2, fused=True))
    for number, (x, labels) in enumerate(batches, 1):
        loss = nn.functional.cross_entropy(model(x), labels)
        losses.append(float(loss.detach()))
        fabric.backward(loss / 2)
        if number % 2 == 0:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    twin = Net()
    own = own_loop(
        twin, torch.optim.AdamW(twin.parameters(), 1e-2, fused=True), batches, dtype=torch.float16, accumulate=2, clip=1
    )
    assert losses == own.losses
    for name, weight in given.named_parameters():
        assert torch.equal(weight, own.weights[name]), name
    assert precision.report().low_flops_share == 1.0


def test_the_module_and_its_copies() -> None:
    precision, given = AmpPrecision(dtype="float16"), Net()
    before, x = dict(given.__dict__), inputs(1)[0]
    wide, low = given(x), amp_compile(given, dtype="float16")(x)
    model = make_fabric(precision).setup(given)
    assert torch.equal(model(x), low)
    assert torch.equal(model.twice(x), low * 2)
    assert torch.equal(copy.deepcopy(given)(x), wide)
    assert torch.equal(pickle.loads(pickle.dumps(given))(x), wide)
    other = make_fabric(AmpPrecision("O0")).setup(given)  # the last one counts
    assert torch.equal(other(x), wide)
    precision.teardown()
    assert torch.equal(other(x), wide)
    other._strategy.teardown()
    assert given.__dict__ == before
    with pytest.raises(ArgumentError, match="already compiled by amp_compile"):
        make_fabric(AmpPrecision()).setup(amp_compile(given))


def test_steps_of_a_lightning_module_and_a_compiled_module() -> None:
    precision, module = AmpPrecision(dtype="float16"), Small()
    fabric = make_fabric(precision)
    model, optimizer = fabric.setup(module, adamw(module))
    fabric.backward(model.training_step(inputs(1)[0], 0))
    optimizer.step()
    assert precision.report("training_step").by_precision["float16"] == 3
    low = amp_compile(net := Net(), dtype="float16")(inputs(1)[0])
    compiled = fabric.setup(torch.compile(net, backend="eager"))
    assert torch.equal(compiled(inputs(1)[0]), low)
    assert list(precision.compiled) == ["training_step", "1.forward"]
    with pytest.raises(ArgumentError, match=r"no report of 'test_step': these have run: training_step, 1\.forward"):
        precision.report("test_step")


@pytest.mark.parametrize("by_name", [True, False])
def test_a_step_that_is_marked_as_a_forward_method(by_name: bool) -> None:
    precision, module = AmpPrecision(dtype="float16"), Small()
    own = inspect.signature(module.training_step)
    model = make_fabric(precision).setup(module)
    model.mark_forward_method("training_step" if by_name else model.training_step)
    assert inspect.ismethod(module.training_step)
    assert inspect.signature(module.training_step) == own
    assert module.training_step.__self__ is module
    model.training_step(inputs(1)[0], 0)
    assert precision.report("training_step").by_precision["float16"] == 3
    copied = copy.deepcopy(module)
    copied.training_step(inputs(1)[0], 0)
    assert copied.training_step.__self__ is copied
    assert type(copied.training_step) is types.MethodType
    with pytest.raises(AttributeError, match="'trainingstep' as a forward method"):
        model.mark_forward_method("trainingstep")


@pytest.mark.parametrize("strategy", ["auto", pytest.param("ddp", marks=pytest.mark.trainers)])
@mock.patch.dict(os.environ)  # Fabric leaves the address of the process group there
def test_any_method_that_is_marked_as_a_forward_method(strategy: str) -> None:
    """It is compiled, also where Fabric sends it through the forward of a wrapper."""
    precision, x = AmpPrecision(dtype="float16"), inputs(1)[0]
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, plugins=precision)
    fabric.launch()
    given = Net()
    before, own, wide = dict(given.__dict__), given.energy, given.energy(x)
    model, optimizer = fabric.setup(given, torch.optim.SGD(given.parameters(), 0.1))
    for _ in range(2):
        model.mark_forward_method("energy")
    low = model.energy(x)
    assert torch.equal(low, amp_compile(own, dtype="float16")(x))
    assert not torch.equal(low, wide)
    fabric.backward(low)
    optimizer.step()
    assert all(p.grad is not None for p in given.parameters())
    assert list(precision.compiled) == ["energy"]
    assert precision.report().by_precision["float16"] == precision.report("energy").by_precision["float16"] > 0
    assert torch.equal(copy.deepcopy(given).energy(x), Net.energy(given, x))
    precision.teardown()
    assert given.__dict__ == before
    if strategy == "ddp":
        torch.distributed.destroy_process_group()


def test_marking_with_another_plugin_is_left_alone() -> None:
    AmpPrecision().convert_module(other := Net())
    assert other.__dict__.get("forward") is not None
    model, x = Fabric(accelerator="cpu", devices=1).setup(net := Net()), inputs(1)[0]
    model.mark_forward_method("energy")
    assert torch.equal(model.energy(x), Net().energy(x))
    assert "energy" not in net.__dict__


def test_two_optimizers_share_a_scale_that_falls() -> None:
    """Both losses first, then both steps: the first step overflows, and the second has to use the old scale."""
    scaler = DynamicLossScaler(init_scale=2.0**14, backoff_factor=2.0**-8)
    fabric, first, second = make_fabric(precision := AmpPrecision(dtype="float16", loss_scaler=scaler)), Net(), Net()
    start = {name: p.detach().clone() for name, p in first.named_parameters()}
    one, one_optimizer = fabric.setup(first, torch.optim.SGD(first.parameters(), 1.0))
    two, two_optimizer = fabric.setup(second, torch.optim.SGD(second.parameters(), 1.0))
    x = inputs(1)[0]
    fabric.backward((one(x) * 2.0**10).square().mean())
    fabric.backward(two(x).square().mean())
    one_optimizer.step()
    assert precision.step_was_skipped
    two_optimizer.step()
    assert not precision.step_was_skipped
    assert all(torch.equal(p, start[name]) for name, p in first.named_parameters())
    net = Net()
    (wide,) = torch.autograd.grad(net(x).square().mean(), [net.up.weight])
    assert torch.allclose(start["up.weight"] - second.up.weight, wide, rtol=0.02, atol=1e-4)
    fabric.backward(one(x).square().mean())
    assert precision.metrics() == {"loss_scale": 2.0**6, "skipped_steps": 1.0}


def test_gradients_that_were_clipped_are_added_to() -> None:
    """Clipped after every micro-batch, never set to zero, and used twice: as without loss scaling."""
    scaler = DynamicLossScaler(init_scale=2.0**10, growth_interval=1)
    fabric, low, wide = make_fabric(AmpPrecision(dtype="float16", loss_scaler=scaler)), Net(), Net()
    model, optimizer = fabric.setup(low, torch.optim.SGD(low.parameters(), 0.1))
    plain = torch.optim.SGD(wide.parameters(), 0.1)
    for number, x in enumerate(inputs(6)):
        fabric.backward(model(x).square().mean())
        wide(x).square().mean().backward()
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        nn.utils.clip_grad_norm_(wide.parameters(), 0.1)
        for _ in range(number % 3):
            optimizer.step()
            plain.step()
    start = dict(Net().named_parameters())
    for name, weight in wide.named_parameters():
        way = (weight - start[name]).detach().norm()
        assert float((low.get_parameter(name) - weight).detach().norm() / way) < 0.02, name


def test_saved_and_loaded_with_the_rest(tmp_path: Path) -> None:
    def run(batches: Sequence[Tensor], path: Path | None = None) -> tuple[dict[str, Any], Fabric]:
        precision, net = AmpPrecision(dtype="float16", loss_scaler=DynamicLossScaler(growth_interval=2)), Net()
        fabric = make_fabric(precision)
        model, optimizer = fabric.setup(net, adamw(net))
        state = {"model": model, "optimizer": optimizer, "precision": precision}
        if path is not None:
            fabric.load(path, state)
        for x in batches:
            fabric.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return state, fabric

    whole, _ = run(inputs(3))
    half, fabric = run(inputs(3)[:2])
    fabric.save(tmp_path / "state.ckpt", half)
    rest, _ = run(inputs(3)[2:], tmp_path / "state.ckpt")
    assert rest["precision"].state_dict() == whole["precision"].state_dict()
    assert rest["precision"].metrics()["loss_scale"] == 2.0**17
    for one, other in zip(rest["model"].parameters(), whole["model"].parameters(), strict=True):
        assert torch.equal(one, other)
