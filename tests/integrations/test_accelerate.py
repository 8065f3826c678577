"""Accelerate: what ``prepare`` gives is our own loop, bit for bit, and what users of Accelerate complain of."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.hf_runs import (
    ACCUMULATE,
    CLIP,
    DECAY,
    LAYERS,
    RATE,
    RUNS,
    fresh_state,
    own_curve,
    reset,
    same_weights,
)
from integrations.trainer_loops import Curve, make_batches, make_model
from torch import Tensor, nn

from amp_compiler import AmpWarning, ArgumentError, DynamicLossScaler, ParallelError, PolicyError, amp_compile
from amp_compiler.integrations.accelerate import amp_module, arm, prepare

__all__ = ["fresh_state"]


def make_linear(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


INPUTS = torch.linspace(-1, 1, 12).reshape(3, 4)


def state_of(optimizer: Any) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def equal_states(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_states(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal_states, one, other))
    return bool(one == other)


@pytest.mark.parametrize(("dtype", "batches"), RUNS)
def test_it_equals_our_own_loop(dtype: torch.dtype, batches: int) -> None:
    model = make_model(layers=LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    prepared, stepper, mover = prepare(accelerator, model, optimizer, scheduler, dtype=dtype)
    curve = Curve()
    for tokens, labels in make_batches(batches):
        with accelerator.accumulate(prepared):
            loss = nn.functional.cross_entropy(prepared(tokens), labels)
            curve.losses.append(float(loss.detach()))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            stepper.step()
            mover.step()
            stepper.zero_grad()
        if accelerator.sync_gradients:
            curve.scales.append(accelerator.scaler.get_scale() if accelerator.scaler else 1.0)
            curve.rates.append(optimizer.param_groups[0]["lr"])
    own = own_curve(dtype, batches)
    assert curve.losses == own.losses
    assert curve.scales == own.scales
    assert curve.rates == own.rates
    assert same_weights(own, model)
    low = "float16" if dtype is torch.float16 else "bfloat16"
    assert dict(amp_module(prepared).report().by_precision) == own.precisions
    assert own.precisions[low] > 10
    assert accelerator.unwrap_model(prepared) is model


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_leaves_weights_optimizer_and_scheduler(fused: bool) -> None:
    model = make_linear()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    accelerator = Accelerator(cpu=True)
    scaler = DynamicLossScaler(init_scale=1024.0)
    prepared, stepper, mover = prepare(
        accelerator, model, optimizer, scheduler, dtype=torch.float16, loss_scaler=scaler
    )

    def update(factor: float) -> None:
        accelerator.backward(prepared(INPUTS).sum() * factor)
        stepper.step()
        mover.step()
        stepper.zero_grad()

    update(1.0)
    assert not accelerator.optimizer_step_was_skipped
    before, state, rate = copy.deepcopy(model.state_dict()), state_of(optimizer), optimizer.param_groups[0]["lr"]
    assert rate == 5e-3
    update(1e35)
    assert accelerator.optimizer_step_was_skipped
    assert stepper.step_was_skipped
    assert equal_states(dict(model.state_dict()), dict(before))
    assert equal_states(optimizer.state_dict(), state)
    assert optimizer.param_groups[0]["lr"] == rate
    assert accelerator.scaler.get_scale() == 512.0
    update(1.0)
    assert not accelerator.optimizer_step_was_skipped
    assert optimizer.param_groups[0]["lr"] == 2.5e-3


# ---------------------------------------------------------------------------------------- what users complain of


def test_clipping_sees_unscaled_gradients() -> None:
    model = make_linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    accelerator = Accelerator(cpu=True)
    prepared, stepper = prepare(accelerator, model, optimizer, dtype=torch.float16, loss_scaler=4096.0)
    plain = copy.deepcopy(model)
    (plain(INPUTS).sum() * 0.1).backward()
    true = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    for clip in (0.5, float("inf")):
        accelerator.backward(prepared(INPUTS).sum() * 0.1)
        norm = accelerator.clip_grad_norm_(prepared.parameters(), clip)
        torch.testing.assert_close(norm, true, rtol=2e-3, atol=0)
        left = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.testing.assert_close(left, norm.clamp(max=clip), rtol=1e-4, atol=0)
        stepper.step()
        stepper.zero_grad()
    accelerator.backward(prepared(INPUTS).sum() * 0.1)
    accelerator.clip_grad_value_(prepared.parameters(), 0.05)
    accelerator.clip_grad_norm_(prepared.parameters(), 1e9)  # a second look divides nothing again
    assert max(float(p.grad.abs().max()) for p in model.parameters()) == pytest.approx(0.05)


def test_clipping_within_an_accumulation_leaves_the_sum_right() -> None:
    """huggingface/accelerate#641: clip_grad_norm_ in every micro-batch was an error with Accelerate's own fp16."""

    def run(scale: float | None) -> list[Tensor]:
        model = make_linear()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        prepared, stepper = prepare(
            accelerator, model, optimizer, level="O0", dtype=torch.float16, loss_scaler=scale
        )
        norms = []
        for _ in range(4):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(INPUTS).square().sum())
                norms.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.25))
                stepper.step()
                stepper.zero_grad()
        return [*norms, *model.parameters()]

    for scaled, plain in zip(run(1024.0), run(None), strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-7)


def test_fp16_parameters_can_be_unscaled() -> None:
    """Not "Attempting to unscale FP16 gradients"."""
    model = make_linear().half()
    before = [p.detach().clone() for p in model.parameters()]
    accelerator = Accelerator(cpu=True)
    prepared, stepper = prepare(
        accelerator, model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16, loss_scaler=128.0
    )
    accelerator.backward(prepared(INPUTS.half()).sum())
    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
    stepper.step()
    assert not accelerator.optimizer_step_was_skipped
    assert not any(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("keep", [True, False])
def test_outputs_keep_their_dtypes(keep: bool) -> None:
    """huggingface/accelerate#3620: outputs are not forced to fp32."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.layer(x)
            return {"own": y.to(torch.bfloat16), "plain": y}

    prepared = prepare(Accelerator(cpu=True), Mixed(), dtype="bfloat16", keep_output_dtypes=keep)
    result = prepared(INPUTS)
    assert result["own"].dtype is torch.bfloat16
    assert result["plain"].dtype is (torch.float32 if keep else torch.bfloat16)


# ------------------------------------------------------------------------------------------------ several optimizers


def same_as_unscaled(program: list[str]) -> None:
    """Run a program of two models with and without loss scaling: sums in fp32, so powers of two change no bit."""

    def run(scaler: DynamicLossScaler | None) -> list[Tensor]:
        reset()
        accelerator = arm(Accelerator(cpu=True), torch.float16, scaler)
        models = {"1": make_linear(1), "2": make_linear(2)}
        made = accelerator.prepare(*(torch.optim.SGD(model.parameters(), 0.1) for model in models.values()))
        optimizers = dict(zip(models, made, strict=True))
        for verb, who in map(str.split, program):
            if verb == "backward":
                accelerator.backward(sum(models[w](INPUTS).square().sum() for w in who))
            for w in who:
                if verb == "clip":
                    accelerator.clip_grad_norm_(models[w].parameters(), 1.0)
                elif verb == "step":
                    optimizers[w].step()
                elif verb == "zero":
                    optimizers[w].zero_grad()
        parameters = [p for model in models.values() for p in model.parameters()]
        accelerator.unscale_gradients()
        return [*parameters, *(p.grad for p in parameters if p.grad is not None)]

    scaled, plain = run(DynamicLossScaler(init_scale=256.0, growth_interval=1, max_scale=2.0**20)), run(None)
    assert len(scaled) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(scaled, plain, strict=True))


def test_two_optimizers_after_one_backward() -> None:
    """Accelerate updates its scaler after each optimizer: the second one is unscaled by another scale, or twice."""
    same_as_unscaled(["backward 12", "clip 1", "clip 2", "step 12", "zero 12", "backward 12", "step 12"])
    same_as_unscaled(["backward 12", "clip 12", "step 1", "zero 1", "backward 2", "step 2"])


@given(
    st.lists(
        st.sampled_from([f"{verb} {who}" for verb in ("backward", "clip", "step", "zero") for who in ("1", "2", "12")]),
        max_size=12,
    )
)
@settings(max_examples=50, deadline=None)
def test_any_order_of_backward_clip_and_step_is_as_without_scaling(program: list[str]) -> None:
    same_as_unscaled(program)


# ------------------------------------------------------------------------------------------------ the user's model


def test_the_model_is_put_back() -> None:
    model = make_linear()
    state = dict(vars(model))
    accelerator = Accelerator(cpu=True)
    prepared, _ = prepare(accelerator, model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16)
    assert prepared is model
    assert list(model.state_dict()) == list(make_linear().state_dict())
    low = prepared(INPUTS)
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert vars(model).keys() - {"_is_accelerate_prepared"} == state.keys()
    assert not torch.equal(model(INPUTS), low)
    prepare(accelerator, model, dtype=torch.bfloat16)
    assert torch.equal(model(INPUTS), low)
    accelerator.free_memory()
    assert "forward" not in vars(model)
    with pytest.raises(ArgumentError, match="put back"):
        amp_module(model)


def test_copies_and_pickles_are_plain() -> None:
    model = make_linear()
    plain = model(INPUTS)
    prepared = prepare(Accelerator(cpu=True), model, dtype=torch.bfloat16)
    low = prepared(INPUTS)
    for twin in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(twin(INPUTS), plain)
        with torch.no_grad():
            twin[0].weight.zero_()
    assert torch.equal(prepared(INPUTS), low)


def test_a_prepared_optimizer_can_be_pickled() -> None:
    model = make_linear()
    accelerator = Accelerator(cpu=True)
    prepared, stepper = prepare(
        accelerator, model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16, loss_scaler=128.0
    )
    train(accelerator, prepared, stepper, [1.0])
    twin = pickle.loads(pickle.dumps(stepper))
    assert equal_states(twin.state_dict(), stepper.state_dict())
    assert not twin.step_was_skipped


def test_nothing_changes_if_prepare_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = make_linear(), make_linear()
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PolicyError, match="nowhere"):
        prepare(accelerator, model, None, other, exclude=["nowhere.*"])
    with pytest.raises(TypeError, match="no_such_option"):
        prepare(accelerator, model, no_such_option=1)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    prepare(accelerator, other, dtype=torch.bfloat16)
    compiled = amp_module(other)
    monkeypatch.setattr(Accelerator, "prepare", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        prepare(accelerator, model, None, other, dtype=torch.float16)
    assert "forward" not in vars(model)
    assert amp_module(other) is compiled
    assert accelerator.scaler is None


def test_the_newest_options_count_and_equal_ones_keep_the_graphs() -> None:
    model = make_linear()
    accelerator = Accelerator(cpu=True)
    prepare(accelerator, model, dtype=torch.bfloat16)
    model(INPUTS)
    compiled = amp_module(model)
    prepare(accelerator, model, dtype=torch.bfloat16)
    assert amp_module(model) is compiled
    prepare(accelerator, model, dtype=torch.bfloat16, exclude=["0"])
    model(INPUTS)
    assert amp_module(model).report().by_precision["bfloat16"] < compiled.report().by_precision["bfloat16"]


def test_a_model_with_a_forward_of_its_own_gets_it_back() -> None:
    model = make_linear()
    own = model.forward
    model.forward = lambda x: own(x) * 2  # type: ignore[method-assign]
    doubled = model.forward
    accelerator = Accelerator(cpu=True)
    prepared = prepare(accelerator, model, dtype=torch.bfloat16, exclude=["0"])
    torch.testing.assert_close(prepared(INPUTS), own(INPUTS) * 2, rtol=2e-2, atol=1e-2)
    assert amp_module(prepared).report().by_precision["bfloat16"] > 0
    accelerator.free_memory()
    assert model.forward is doubled


# -------------------------------------------------------------------------------------------------------- checkpoints


def train(accelerator: Accelerator, prepared: nn.Module, stepper: Any, factors: list[float]) -> None:
    for factor in factors:
        accelerator.backward(prepared(INPUTS).square().sum() * factor)
        stepper.step()
        stepper.zero_grad()


def test_save_state_and_load_state_carry_the_scale(tmp_path: Path) -> None:
    def make() -> tuple[Accelerator, nn.Module, Any]:
        reset()
        model = make_linear()
        accelerator = Accelerator(cpu=True)
        scaler = DynamicLossScaler(init_scale=1024.0, growth_interval=3)
        made = prepare(accelerator, model, torch.optim.AdamW(model.parameters(), 1e-2), dtype="float16",
                       loss_scaler=scaler)  # fmt: skip
        return accelerator, *made

    accelerator, model, stepper = make()
    train(accelerator, model, stepper, [1.0, 1e35, 1.0])
    accelerator.save_state(str(tmp_path))
    train(accelerator, model, stepper, [1.0, 1.0])
    expected, scale = copy.deepcopy(model.state_dict()), accelerator.scaler.get_scale()
    assert scale == 1024.0  # 512, and grown after three finite updates

    accelerator, model, stepper = make()
    accelerator.load_state(str(tmp_path))
    train(accelerator, model, stepper, [1.0, 1.0])
    assert accelerator.scaler.get_scale() == scale
    assert equal_states(dict(model.state_dict()), dict(expected))

    (tmp_path / "scaler.pt").unlink()  # as a run without loss scaling leaves it
    accelerator, model, stepper = make()
    with pytest.warns(AmpWarning, match="without a loss scaler"):
        accelerator.load_state(str(tmp_path))
    assert accelerator.scaler.get_scale() == 1024.0


# ------------------------------------------------------------------------------------------------------------- errors


def test_a_second_precision_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"mixed_precision='no'.*dtype=torch.bfloat16"):
        prepare(Accelerator(cpu=True, mixed_precision="bf16"), make_linear())


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_what_is_not_supported_says_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType[kind])
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ParallelError, match=kind):
        prepare(accelerator, make_linear())


def test_one_scaler_per_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    model, critic = make_linear(), make_linear(1)
    prepare(accelerator, model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16)
    scaler = accelerator.scaler
    prepare(accelerator, critic, torch.optim.SGD(critic.parameters(), 0.1), dtype=torch.bfloat16)
    assert accelerator.scaler is scaler
    with pytest.raises(ArgumentError, match="one scale"):
        prepare(accelerator, critic, loss_scaler=DynamicLossScaler())


def test_an_optimizer_that_was_prepared_before_is_not_left_with_scaled_gradients() -> None:
    model = make_linear()
    accelerator = Accelerator(cpu=True)
    stepper = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    before = [p.detach().clone() for p in model.parameters()]
    prepared = prepare(accelerator, model, level="O0", dtype=torch.float16, loss_scaler=1024.0)
    accelerator.backward(prepared(INPUTS).sum())
    stepper.step()
    stepper.zero_grad()
    plain = make_linear()
    plain(INPUTS).sum().backward()
    for p, was, other in zip(model.parameters(), before, plain.parameters(), strict=True):
        torch.testing.assert_close(p, was - 0.1 * other.grad)


def test_a_compiled_model_and_lbfgs_are_errors() -> None:
    model = make_linear()
    with pytest.raises(ArgumentError, match="original"):
        prepare(Accelerator(cpu=True), amp_compile(model))
    with pytest.raises(ArgumentError, match="closure"):
        prepare(Accelerator(cpu=True), model, torch.optim.LBFGS(model.parameters()), dtype=torch.float16)
    assert "forward" not in vars(model)


def test_an_optimizer_without_gradients_does_nothing() -> None:
    model, idle = make_linear(), make_linear(1)
    accelerator = Accelerator(cpu=True)
    made = prepare(accelerator, model, torch.optim.SGD(model.parameters(), 0.1), idle,
                   torch.optim.SGD(idle.parameters(), 0.1), dtype=torch.float16, loss_scaler=128.0)  # fmt: skip
    made[3].step()
    train(accelerator, made[0], made[1], [1.0])
    made[3].step()
    assert not accelerator.optimizer_step_was_skipped
    assert equal_states(dict(idle.state_dict()), dict(make_linear(1).state_dict()))
