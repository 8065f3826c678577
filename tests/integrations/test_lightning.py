"""``AmpPrecision`` in Lightning's Trainer: the numbers of our own loop, and nothing left behind."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from integrations.lightning_modules import Classifier, Curve, Small, inputs, loader, make_trainer
from integrations.trainer_loops import make_batches, make_model, own_loop
from lightning.pytorch import Callback
from torch import Tensor, nn

from amp_compiler import ArgumentError, DynamicLossScaler, amp_compile
from amp_compiler.integrations.lightning import AmpPrecision

LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOW)
def test_fifty_steps_equal_our_own_loop_bit_for_bit(dtype: torch.dtype) -> None:
    batches, curve, module = make_batches(50), Curve(), Classifier()
    trainer = make_trainer(
        AmpPrecision(dtype=dtype), accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[curve]
    )
    trainer.fit(module, loader(batches))
    model = make_model()
    own = own_loop(model, torch.optim.AdamW(model.parameters(), 1e-2), batches, dtype=dtype, accumulate=2, clip=1.0)
    assert curve.losses == own.losses
    assert curve.scales == own.scales
    for name, weight in module.net.named_parameters():
        assert torch.equal(weight, own.weights[name]), name


def schedule(kind: str = "step") -> Any:
    def make(module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": kind}}

    return make


def test_an_overflow_leaves_scheduler_weights_and_optimizer_where_they_were() -> None:
    module, curve = Small(schedule()), Curve()
    before = copy.deepcopy(module.state_dict())
    precision = AmpPrecision(dtype="float16", loss_scaler=DynamicLossScaler(init_scale=2.0**60, backoff_factor=2.0**-30))
    trainer = make_trainer(precision, callbacks=[curve])
    trainer.fit(module, loader(inputs(1)))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert trainer.optimizers[0].state_dict()["state"] == {}
    assert curve.rates == [1e-2]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 0
    assert trainer.lr_scheduler_configs[0].frequency == 1
    assert precision.metrics() == {"loss_scale": 2.0**30, "skipped_steps": 1.0}

    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(inputs(2)))
    assert precision.metrics()["skipped_steps"] == 2.0
    assert curve.rates == [1e-2, 1e-2, 0.5e-2]
    assert not any(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_schedulers_that_move_with_epochs_are_left_alone() -> None:
    module = Small(schedule("epoch"))
    trainer = make_trainer(AmpPrecision(dtype="float16", loss_scaler=2.0**100))
    trainer.fit(module, loader(inputs(1)))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("fused", [False, True])
def test_unscaled_gradients_are_clipped(algorithm: str, fused: bool) -> None:
    """Lightning-AI/pytorch-lightning#9694, #21435: scaled gradients were clipped, or fused optimizers refused."""
    seen: list[float] = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(float(pl_module.up.weight.grad.norm()))

    results = []
    for scale in (1.0, 2.0**15):
        module = Small(lambda m: torch.optim.SGD(m.parameters(), 1.0, fused=fused))
        precision = AmpPrecision(dtype="float16", loss_scaler=scale)
        trainer = make_trainer(
            precision, gradient_clip_val=1e-2, gradient_clip_algorithm=algorithm, callbacks=[Look()]
        )
        trainer.fit(module, loader(inputs(1)))
        results.append(module)
    low, high = ({n: p.detach() for n, p in m.named_parameters()} for m in results)
    assert seen[0] == pytest.approx(seen[1], rel=1e-2)
    start = dict(Small().named_parameters())
    moved = [high[name] - start[name].detach() for name in high]
    size = max(m.abs().max() for m in moved) if algorithm == "value" else torch.cat([m.flatten() for m in moved]).norm()
    assert float(size) == pytest.approx(1e-2, rel=1e-3)
    for name in low:
        assert torch.allclose(low[name], high[name], atol=1e-4), name


def test_the_module_is_as_it_was_also_after_an_exception() -> None:
    class Stop(RuntimeError):
        pass

    class Failing(Small):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise Stop
            return loss

    module, precision = Failing(), AmpPrecision(dtype="float16")
    make_trainer(precision).validate(module, loader(inputs(1)), verbose=False)  # sets what Lightning itself leaves
    before = dict(module.__dict__)
    trainer = make_trainer(precision := AmpPrecision(dtype="float16"))
    with pytest.raises(Stop):
        trainer.fit(module, loader(inputs(3)))
    assert {**module.__dict__, "_trainer": None} == {**before, "_trainer": None}
    assert "training_step" not in module.__dict__
    module.trainer = None
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module).down))
    assert torch.equal(twin.weight, module.down.weight)
    with pytest.raises(Stop):
        trainer.fit(module, loader(inputs(3)))  # the iteration that was broken off is forgotten
