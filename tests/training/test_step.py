"""``compile_train_step``: what it takes, what it gives back, and that it trains like the loop written by hand."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_compiler import DynamicLossScaler, StaticLossScaler, amp_compile, compile_train_step
from amp_compiler.common.errors import AmpError, ArgumentError
from amp_compiler.inspect.profile import count_ops
from helpers import BF16, F16
from networks import NETWORKS
from training_helpers import Loop, bad, batches, differences, fused_adamw, gradients, sgd, state, trains_like

pieces_expected = pytest.mark.filterwarnings("ignore:amp_compile. the training step is not one graph")


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def make(model: nn.Module, loss_fn: Any = F.mse_loss, **kwargs: Any) -> Any:
    return compile_train_step(model, loss_fn, sgd(model.parameters()), **{"level": "O0", **kwargs})


GOOD = batches(4, (5, 3), (5, 2))


# ---------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": amp_compile(nn.Linear(3, 2))}, r"model\.original"),
        ({"model": lambda x: x}, r"torch\.nn\.Module"),
        ({"loss_fn": "mse"}, "loss_fn"),
        ({"optimizer": torch.optim.SGD}, r"torch\.optim\.Optimizer"),
        ({"optimizer": sgd(nn.Linear(3, 2).parameters())}, "none of the model's parameters"),
        ({"level": "O9"}, "O9"),
        ({"dtype": torch.int8}, "int8"),
        ({"loss_scaler": "static"}, "static.*dynamic"),
        ({"loss_scaler": True}, "loss_scaler"),
        ({"loss_scaler": torch.amp.GradScaler("cpu")}, "DynamicLossScaler"),
        ({"loss_scaler": 0.0}, "scale"),
        ({"loss_scaler": float("nan")}, "scale"),
        ({"accumulate_steps": 0}, "accumulate_steps"),
        ({"accumulate_steps": 1.5}, "accumulate_steps"),
        ({"accumulate_steps": True}, "accumulate_steps"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"disable_passes": ["scale_los"]}, "scale_loss"),
        ({"white_list": ["lineer"]}, "linear"),
        ({"backend": "tpu"}, "tpu"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 2)
    given = {"model": model, "loss_fn": F.mse_loss, "optimizer": sgd(model.parameters()), **change}
    with pytest.raises(AmpError, match=message):
        compile_train_step(**given)


def test_wrong_calls() -> None:
    model = network()
    step = make(model)
    with pytest.raises(ArgumentError, match="inference_mode"), torch.inference_mode():
        step(*GOOD[0])
    with pytest.raises(ArgumentError, match="names"):
        step({0: GOOD[0][0]})
    with torch.no_grad():  # as in a function that a user decorated; eager code would fail
        step(*GOOD[0])
    assert model[0].weight.grad is not None
    assert "SGD" in repr(step)
    assert "O0" in repr(step)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (None, r"scalar.*\[5, 2\]: pass a loss_fn"),
        (lambda output, targets: {"total": output.sum()}, "dict"),
        (lambda output, targets: output.detach().sum(), "gradient"),
        (lambda output, targets: (output > 0).sum(), "gradient"),
    ],
)
@pieces_expected
def test_what_is_no_loss(loss_fn: Any, message: str) -> None:
    step = make(network(), loss_fn)
    with pytest.raises(ArgumentError, match=message):
        step(*GOOD[0])


# --------------------------------------------------------------------------------------- inputs and targets


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Keywords(nn.Module):
    """As in ``transformers``: keyword arguments, the loss inside, an object given back."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.kind = nn.Linear(3, 2), kind

    def forward(self, x: Tensor, *, shift: Tensor | None = None, labels: Tensor) -> Any:
        logits = self.out(x) if shift is None else self.out(x) + shift
        loss = F.mse_loss(logits, labels)
        if self.kind == "dict":
            return {"loss": loss, "logits": logits}
        if self.kind == "ModelOutput":
            from transformers.modeling_outputs import SequenceClassifierOutput

            return SequenceClassifierOutput(loss=loss, logits=logits)
        return loss if self.kind == "scalar" else Output(loss, logits)


@pytest.mark.parametrize("kind", ["object", "ModelOutput", "dict"])
def test_a_model_with_its_own_loss(kind: str) -> None:
    if kind == "ModelOutput":
        pytest.importorskip("transformers")
    model, twin = Keywords(kind), Keywords("scalar")
    step, loop = make(model, None), Loop(twin, None, sgd(twin.parameters()))
    for x, y in GOOD[:2]:
        assert float(step({"x": x, "labels": y}).loss) == float(loop({"x": x, "labels": y}))
    assert differences(state(model), state(twin)) == []


def test_inputs_as_a_tuple_targets_as_tuple_and_dict() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 2)

        def forward(self, x: Tensor, factor: Tensor, flag: bool = False) -> tuple[Tensor, Tensor]:
            return self.out(x * factor), self.out(x if flag else -x)

    def in_tuple(output: Any, targets: Any) -> Tensor:
        return F.mse_loss(output[0], targets[0]) + targets[1] * F.l1_loss(output[1], targets[0])

    def in_dict(output: Any, targets: Any) -> Tensor:
        return F.mse_loss(output[0], targets["y"]) * targets["weight"]

    torch.manual_seed(0)
    two = torch.tensor(2.0)
    trains_like(Two(), [((x, two), (y, 0.5)) for x, y in GOOD[:2]], in_tuple)
    trains_like(Two(), [((x, two, True), {"y": y, "weight": two}) for x, y in GOOD[:2]], in_dict)


def test_a_loss_of_shape_1() -> None:
    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(output, targets).reshape(1)

    step = trains_like(network(), GOOD, loss_fn, accumulate_steps=2)
    assert step(*GOOD[0]).loss.shape == (1,)


def test_an_input_that_requires_a_gradient_gets_it_unscaled() -> None:
    model = network()
    x, y = GOOD[0]
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    F.mse_loss(model(theirs), y).backward()
    make(model)(ours, y)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pieces_expected
def test_an_input_that_another_model_computed() -> None:
    """``step(encoder(x), y)``: the encoder is trained too, or an error says that it would not be."""
    encoder, model = nn.Linear(3, 3), network()
    x, y = GOOD[0]
    expected = torch.autograd.grad(F.mse_loss(model(encoder(x)), y), encoder.weight)[0]
    step = compile_train_step(model, F.mse_loss, sgd([*model.parameters(), *encoder.parameters()]), level="O0")
    refused = None
    try:
        step(encoder(x), y)
    except ArgumentError as error:
        refused = str(error)
    if refused is None:
        torch.testing.assert_close(encoder.weight.grad, expected)
    else:
        assert "detach" in refused


# --------------------------------------------------------------------------------------------------- results


def test_the_result_and_the_gradients() -> None:
    """Losses not scaled, gradients unscaled fp32 and readable until the next call, the norm before clipping."""
    model, twin = network(), network()
    step = make(model, loss_scaler=1024.0, max_grad_norm=0.01)
    x, y = GOOD[0]
    loss = F.mse_loss(twin(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    result = step(x, y)
    assert {type(v) for v in (result.loss, result.skipped, result.scale, result.grad_norm)} == {Tensor}
    assert not result.loss.requires_grad
    assert float(result.loss) == loss.item()
    assert float(result.grad_norm) == float(norm) > 0.01
    assert float(result.scale) == 1024.0
    assert result.skipped.dtype == torch.bool
    assert differences(gradients(model), gradients(twin)) == []
    held = result.scale.clone(), result.loss.clone(), result.grad_norm.clone(), result.skipped.clone()
    step(*bad(GOOD[1]))  # a result stays what it was
    assert (result.scale, result.loss, result.grad_norm, result.skipped) == held


@pytest.mark.parametrize("scaler", [None, "dynamic"])
def test_gradients_are_tensors_of_their_own(scaler: Any) -> None:
    """Two parameters with one gradient, one whose gradient is 1 everywhere, a loss that is a parameter: the joint graph
    gives the same memory for some of them, which clipping and accumulation must not see."""

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(5, 3))
            self.row, self.ones, self.one = (nn.Parameter(torch.ones(s)) for s in ((1, 5, 3), (4,), ()))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.a + self.b + self.row).pow(2).mean() + self.ones.sum() + self.one

    given = [(x, None) for x, _ in GOOD]
    step = trains_like(Same(), given, None, accumulate_steps=2, max_grad_norm=0.5, loss_scaler=scaler)
    memory = [p.grad.untyped_storage().data_ptr() for p in step.model.parameters()]
    assert len(set(memory)) == len(memory)


def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    """torch's fused optimizers go through parameter, gradient and state side by side, whatever the strides say."""

    class Strides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 2)
            self.turned = nn.Parameter(torch.randn(6, 4).t())

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).flatten(2).transpose(1, 2) @ self.turned

    x = torch.randn(2, 3, 3, 3).to(memory_format=torch.channels_last)
    step = trains_like(Strides(), [(x, torch.zeros(2, 4, 6))] * 3, optimizer=fused_adamw)
    for parameter in step.model.parameters():
        assert parameter.grad.stride() == parameter.stride()


# ------------------------------------------------------------------------------------------------ parameters


class Odd(nn.Module):
    """Parameters in all conditions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.detached = nn.Parameter(torch.ones(3))
        self.looked_at = nn.Parameter(torch.ones(3))
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.used.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.looked_at * 2
        x = self.used(self.used(x)) * self.detached.detach() + shift
        return self.tied(self.frozen(x))


def test_parameters_in_all_conditions() -> None:
    """Unused, detached, frozen, tied, used twice: gradient and value as in the loop by hand. And frozen ones may be
    thawed, others frozen, and groups added while it trains."""
    model, twin, size = Odd(), Odd(), 2
    given = batches(6 * size, (5, 3))
    made = []
    for m in (model, twin):
        made.append(torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9))
    step = compile_train_step(model, F.mse_loss, made[0], level="O0", accumulate_steps=size)
    loop = Loop(twin, F.mse_loss, made[1], accumulate_steps=size)
    for update in range(6):
        if update == 2:
            for m, optimizer in zip((model, twin), made, strict=True):
                m.frozen.requires_grad_(True)
                optimizer.add_param_group({"params": list(m.frozen.parameters()), "lr": 0.01})
        if update == 4:
            for m in (model, twin):
                m.used.bias.requires_grad_(False)
        for batch in given[update * size : (update + 1) * size]:
            step(*batch)
            loop(*batch)
        assert differences(state(model, made[0]), state(twin, made[1])) == []
        mine, other = gradients(model), gradients(twin)
        assert [k for k, v in mine.items() if v is None] == [k for k, v in other.items() if v is None]
    assert gradients(model)["detached"] is None
    assert gradients(model)["unused.weight"] is None
    assert gradients(model)["used.bias"] is None


def test_changed_by_hand_and_replaced() -> None:
    """At O2, one batch an update: whatever a user does to the weights between updates counts."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    step = compile_train_step(model, lambda o, t: o.float().sum(), torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(1, 3)

    def loss() -> float:
        return float(step(x).loss)

    with torch.no_grad():
        model[0].weight.fill_(1.0)
    assert loss() == 6.0
    model[0].weight.data.mul_(2)
    assert loss() == 12.0
    model.load_state_dict({"0.weight": torch.full((2, 3), 3.0)})
    assert loss() == 18.0
    model[0].weight.data = torch.full((2, 3), 4.0)
    assert loss() == 24.0
    model[0] = nn.Linear(3, 2, bias=False)
    nn.init.constant_(model[0].weight, 5.0)
    assert loss() == 30.0


def test_low_and_double_parameters() -> None:
    for dtype in (BF16, torch.float64):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(dtype)
        step = make(model, level="O2", accumulate_steps=2)
        for x, y in GOOD:
            result = step(x.to(dtype), y.to(dtype))
        assert model.weight.grad.dtype == dtype
        assert result.grad_norm.dtype == torch.float32
        assert bool(model.weight.isfinite().all())


# ------------------------------------------------------------------------------------ modes, sizes, randomness


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def test_modes_and_batch_sizes_change_on_the_way() -> None:
    """train(), eval(), a smaller last batch, in the middle of a window too; dropout draws what it draws in eager."""
    model, twin = Modes(), Modes()
    step = make(model, accumulate_steps=2)
    loop = Loop(twin, F.mse_loss, sgd(twin.parameters()), accumulate_steps=2)
    sizes, evaluated = (6, 6, 6, 4, 6, 3, 6, 6, 5, 2), (6, 8)
    for i, size in enumerate(sizes):
        x, y = batches(1, (size, 3), (size, 2), seed=i)[0]
        losses = []
        for m, run in ((model, step), (twin, loop)):
            m.train(i not in evaluated)
            torch.manual_seed(i)
            result = run(x, y)
            losses.append(float(result if isinstance(result, Tensor) else result.loss))
        assert losses[0] == losses[1], i
    assert differences(state(model), state(twin)) == []
    assert len(step.joint_graphs) <= 5


def test_a_custom_function_and_changing_sizes() -> None:
    model, _ = NETWORKS["custom_function"]()
    given = [batches(1, (size, 16), (size, 8))[0] for size in (4, 3, 2)]
    step = trains_like(model, given)
    assert len(step.joint_graphs) == 2  # one for the first size, one for all others


def test_steps_do_not_learn_sizes_from_each_other() -> None:
    """Dynamo makes a size dynamic when it changes; that of another step's batch is no change."""
    for size in (5, 4):
        step = make(network())
        step(*batches(1, (size, 3), (size, 2))[0])
        values = [n.meta["val"] for n in step.joint_graphs[0].graph.nodes if n.op == "placeholder"]
        assert all(isinstance(v, Tensor) and all(type(s) is int for s in v.shape) for v in values)


def test_checkpointed_layers_train_the_same() -> None:
    class Checkpointed(Modes):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(lambda x: self.drop(self.first(x)).tanh(), x, use_reentrant=False))

    step = trains_like(Checkpointed(), GOOD, seed=3)
    assert len(step.joint_graphs) == 1


def test_checkpointed_layers_are_computed_again() -> None:
    """One graph could keep their values instead, and the memory would not drop."""
    counts = {}
    for again in (False, True):
        layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(3))

        def forward(x: Tensor, layers: nn.ModuleList = layers, again: bool = again) -> Tensor:
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            return x

        model = nn.Module()
        model.layers, model.forward = layers, forward
        step = make(model, level="O0")
        batch = batches(1, (4, 3), (4, 3))[0]
        step(*batch)
        assert len(step.joint_graphs) == 1
        counts[again] = count_ops(lambda: step(*batch))["aten::addmm"]  # noqa: B023
    assert counts[False] == 6
    assert counts[True] >= 9  # at least the first linear of each layer once more


# ------------------------------------------------------------------------------------------------- loss scaler


def test_kinds_of_scalers() -> None:
    model = network()
    dynamic, static = DynamicLossScaler(init_scale=16.0), StaticLossScaler(4.0)
    assert make(model, loss_scaler=dynamic).scaler is dynamic
    assert make(model, loss_scaler=static).scaler is static
    assert make(model, loss_scaler=None).scaler is None
    assert isinstance(make(model).scaler, DynamicLossScaler)
    assert make(model).scaler.get_scale() == 2.0**16
    step = make(model, loss_scaler=128)
    assert isinstance(step.scaler, StaticLossScaler)
    results = [step(*batch) for batch in (GOOD[0], bad(GOOD[0]), GOOD[0])]
    assert [float(r.scale) for r in results] == [128.0] * 3
    assert [bool(r.skipped) for r in results] == [False, True, False]


def test_a_scaler_that_two_steps_share() -> None:
    """Both see the other's overflows; the scale of a window stays that of its beginning."""
    scaler = DynamicLossScaler(init_scale=16.0, growth_interval=100)
    first, second = make(network(), loss_scaler=scaler, accumulate_steps=2), make(network(1), loss_scaler=scaler)
    assert float(first(*GOOD[0]).scale) == 16.0
    assert float(second(*bad(GOOD[1])).scale) == 16.0
    assert float(first(*GOOD[2]).scale) == 16.0
    assert float(first(*GOOD[0]).scale) == 8.0
    assert float(second(*GOOD[1]).scale) == 8.0


def test_scale_loss_switched_off() -> None:
    model, twin = network(), network()
    step = make(model, disable_passes=["scale_loss"])
    loop = Loop(twin, F.mse_loss, sgd(twin.parameters()))
    result = step(*GOOD[0])
    loop(*GOOD[0])
    assert float(result.scale) == 1.0
    assert differences(state(model), state(twin)) == []
    (record,) = [record for record in step.history if record.name == "scale_loss"]
    assert not record.modified
    assert "unscale" not in record.text
    assert not bool(step(*bad(GOOD[1])).skipped)
    assert bool(model[0].weight.isnan().any())


# --------------------------------------------------------------------------------------------------- looking


def test_what_a_step_shows() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    step = make(model, level="O2", dtype=F16, accumulate_steps=2)
    before = step.report()
    assert before.rows == ()
    assert step.graphs == step.joint_graphs == step.history == []
    step(*GOOD[0])
    (graph,), (joint,) = step.graphs, step.joint_graphs
    names = [record.name for record in step.history]
    assert names.index("capture") < names.index("insert_casts") < names.index("scale_loss") < names.index("fold_casts")
    assert "hoist_weight_casts" in names
    for record in step.history:
        assert record.seconds >= 0
        assert isinstance(record.text, str)
    text = next(record.text for record in step.history if record.name == "scale_loss")
    assert "unscale" in text
    assert "saved_" in text
    assert "linear" in graph.print_readable(print_output=False)
    code = joint.print_readable(print_output=False)
    assert "scale" in code
    assert "batch_norm" in code
    report = step.report()
    assert {row.module for row in report.why("linear")} == {"0", "2"}
    assert {row.precision for row in report.why("linear")} == {"float16"}
    assert {row.precision for row in report.why("mse_loss")} == {"float32"}
    assert sum(report.by_precision.values()) == len(report.rows)
    assert report.low_flops_share == 1.0
    assert report.casts > 0
    assert report.cast_bytes > 0
    assert report.notes == ()
    assert report.not_captured == ()
    assert json.loads(report.to_json())["casts"] == report.casts
    step(*GOOD[1])
    step(*GOOD[2])
    assert len(step.joint_graphs) == 1  # nothing is captured twice
    assert step.report() == report


def test_options_reach_the_policy() -> None:
    model = network()
    step = make(model, level="O1", dtype=BF16, exclude=["2"], black_list=["relu"], loss_scaler=None)
    step(*GOOD[0])
    precision = {row.module: row.precision for row in step.report().why("linear")}
    assert precision == {"0": "bfloat16", "2": "float32"}
    assert {row.precision for row in step.report().why("relu")} == {"float32"}


def test_two_steps_on_one_model() -> None:
    """Two optimizers on two parts, in turn, as for a generator and its critic."""
    model, twin = network(), network()
    pairs = [(sgd(m[0].parameters()), sgd(m[2].parameters())) for m in (model, twin)]

    def other_loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.l1_loss(output, -targets)

    losses = (F.mse_loss, other_loss)
    steps = [compile_train_step(model, f, o, level="O0") for f, o in zip(losses, pairs[0], strict=True)]
    for x, y in GOOD:
        for step, f, optimizer in zip(steps, losses, pairs[1], strict=True):
            step(x, y)
            twin.zero_grad()
            f(twin(x), y).backward()
            optimizer.step()
    assert differences(state(model), state(twin)) == []


def test_inside_the_users_autocast() -> None:
    """The policy wins, and a warning says so, once."""
    model, twin = network(), network()
    step, loop = make(model), Loop(twin, F.mse_loss, sgd(twin.parameters()))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with torch.autocast("cpu", BF16):
            for batch in GOOD[:2]:
                step(*batch)
    for batch in GOOD[:2]:
        loop(*batch)
    assert sum("autocast" in str(w.message) for w in seen) == 1
    assert differences(state(model), state(twin)) == []
