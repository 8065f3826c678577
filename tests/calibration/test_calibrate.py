"""``calibrate``: the ranges are those that hooks see in fp32, through all that a graph may hold; bad input."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_compiler import AmpWarning, Calibration, CalibrationError, calibrate
from amp_compiler.calibration.row import Row
from amp_compiler.common.torch_names import pytree
from networks import NETWORKS

#: layers of which one op gives the output, by the name of that op
OPS = {nn.Linear: "linear", nn.Conv2d: "conv2d", nn.BatchNorm2d: "batch_norm", nn.LayerNorm: "layer_norm",
       nn.Embedding: "embedding"}  # fmt: skip


def mean_square(output: Any, targets: Any = None) -> Tensor:
    first = pytree.tree_leaves(output)[0]
    return first.float().square().mean()


def row(found: Calibration, op: str, module: str = "") -> Row:
    (match,) = [r for r in found.rows if (r.op, r.module) == (op, module)]
    return match


@pytest.mark.parametrize(
    "name", ["dense", "conv_bn", "encoder", "graph_break", pytest.param("mlp_mixer", marks=pytest.mark.zoo)]
)
def test_ranges_are_what_hooks_see(name: str) -> None:
    model, args = NETWORKS[name]()
    batches = [args, tuple(a * 3 if a.is_floating_point() else a for a in args)]
    found = calibrate(copy.deepcopy(model), [(batch, None) for batch in batches], mean_square, scale=1.0)
    outputs: dict[str, list[Tensor]] = {}
    gradients: dict[str, list[Tensor]] = {}

    def watch(path: str) -> Any:
        def hook(module: nn.Module, given: Any, output: Tensor) -> None:
            outputs.setdefault(path, []).append(output.detach().clone())
            output.register_hook(lambda g: gradients.setdefault(path, []).append(g.clone()))

        return hook

    layers = {path: OPS[type(m)] for path, m in model.named_modules() if type(m) in OPS}
    for path in layers:
        model.get_submodule(path).register_forward_hook(watch(path))
    for batch in batches:
        mean_square(model(*batch)).backward()
    assert len(layers) >= 2
    for path, op in layers.items():
        if path not in outputs:
            continue
        seen, slopes = (torch.cat([t.reshape(-1) for t in d[path]]) for d in (outputs, gradients))
        mine = row(found, op, path)
        assert (mine.result.elements, mine.max_abs) == (seen.numel(), float(seen.abs().max()))
        assert mine.min_nonzero == float(seen[seen != 0].abs().min())
        assert mine.gradient is not None
        assert mine.gradient.max_abs == pytest.approx(float(slopes.abs().max()), rel=1e-5)
        assert mine.gradient.elements == slopes.numel()


def test_the_model_is_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    model[0].weight.grad = torch.ones(8, 4)
    before, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    calibrate(model, [(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 1))], F.mse_loss)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert torch.equal(torch.get_rng_state(), seed)
    assert torch.equal(model[0].weight.grad, torch.ones(8, 4))
    assert model[3].weight.grad is None
    assert not model[0]._forward_hooks
    assert model.training


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(lambda y: torch.exp(self.first(y)), x, use_reentrant=False))


class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.fc(y) * 2, lambda y: self.fc(y) * 3, (x,))


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.scan import scan

        def step(carry: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(self.fc(carry) + y)
            return new, new * 5

        return scan(step, torch.zeros(4), x)[1]


def test_a_checkpoint_is_recorded_once() -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(3, 4)
    found = calibrate(model, [(x, None)], mean_square)
    inner = row(found, "linear", "first")
    assert inner.result.elements == 12
    assert inner.gradient is not None
    assert inner.gradient.elements == 12
    assert inner.sensitivity > 0
    assert row(found, "exp").max_abs == float(model.first(x).exp().abs().max())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_branch_of_a_cond_that_ran_is_recorded(sign: float) -> None:
    torch.manual_seed(0)
    model, x = Cond(), sign * torch.rand(3, 4)
    found = calibrate(model, [(x, None)], mean_square)
    (product,) = [r for r in found.rows if r.op == "mul"]
    assert product.max_abs == float((model.fc(x) * (2 if sign > 0 else 3)).abs().max())
    assert product.gradient is not None
    assert product.gradient.elements == 12


def test_every_step_of_a_scan_is_recorded() -> None:
    torch.manual_seed(0)
    model, x = Scan(), torch.randn(6, 4)
    found = calibrate(model, [(x, None)], mean_square)
    (product,) = [r for r in found.rows if r.op == "mul"]
    assert product.result.elements == 24
    assert product.max_abs == float(model(x).abs().max())
    assert row(found, "tanh").sensitivity > 0


def test_shapes_that_are_compiled_anew_are_merged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    found = calibrate(model, [(torch.ones(n, 4), None) for n in (2, 3, 5)], mean_square)
    assert row(found, "linear", "0").result.elements == 40
    assert found.batches == 3


def test_a_loss_of_the_model_itself() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.fc(x)
            return {"loss": F.mse_loss(output, labels), "logits": output}

    found = calibrate(Own(), [({"x": torch.ones(2, 4), "labels": torch.zeros(2, 1)}, None)])
    assert found.has_gradients
    assert row(found, "linear", "fc").gradient is not None


def test_without_a_loss_sensitivities_are_of_the_outputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).eval().requires_grad_(False)
    found = calibrate(model, [torch.randn(32, 16) for _ in range(4)])
    assert not found.has_gradients
    last = row(found, "linear", "1")
    assert last.gradient is None
    assert not any(p.requires_grad for p in model.parameters())
    outputs = [model(torch.randn(32, 16)).double() for _ in range(4)]
    own = sum(float((y.half().double() - y).square().sum()) for y in outputs) / 4  # of rounding the result alone
    assert own < last.sensitivity < 5 * own


def test_the_scale_multiplies_gradients_only() -> None:
    model = nn.Linear(4, 1)
    batches = [(torch.ones(2, 4), torch.zeros(2, 1))]
    one, many = (calibrate(model, batches, F.mse_loss, scale=s) for s in (1.0, 1024.0))
    a, b = row(one, "linear"), row(many, "linear")
    assert a.result == b.result
    assert a.sensitivity == b.sensitivity
    assert a.gradient is not None
    assert b.gradient is not None
    assert b.gradient.max_abs == 1024 * a.gradient.max_abs


class Frozen(nn.Module):
    """The values of its products fit fp16; the gradient between them does not, and that of the scale is large."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(1e-4))
        self.large = nn.Parameter(torch.tensor(1e4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1) + self.fc(x) * self.large * self.scale


def test_a_batch_that_comes_again_changes_no_average() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), (torch.randn(3, 4), None)
    once, often = (calibrate(model, [batch] * times, mean_square, scale=1.0).rows for times in (1, 5))
    for a, b in zip(once, often, strict=True):
        assert b.sensitivity == pytest.approx(a.sensitivity)
        assert a.gradient is not None
        assert b.gradient is not None
        assert (b.gradient.elements, b.gradient.max_abs) == (5 * a.gradient.elements, a.gradient.max_abs)
        assert [r.elements for r in b.operand_gradients] == [5 * r.elements for r in a.operand_gradients]


def test_gradients_are_those_that_training_computes() -> None:
    torch.manual_seed(0)
    found = calibrate(Frozen(), [(torch.rand(3, 4), None)], lambda output, _: 1e-5 * output.sum(), scale=1.0)
    first, second = (r for r in found.rows if r.op == "mul" and "self.fc" in r.source)
    assert [r.elements for r in first.operand_gradients] == [12, 0], "the second is frozen"
    assert first.gradient is not None
    assert first.gradient.underflow == 1
    assert [r.underflow for r in second.operand_gradients] == [1, 0], "a large gradient does not hide a small one"
    data = next(r for r in found.rows if r.op == "add" and r.module == "" and r.number == 0)
    assert data.gradient is not None
    assert data.gradient.elements == 0, "training computes no gradient of the data"
    assert data.sensitivity > 0


def test_tiny_gradients_ask_for_a_scale() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return 1e-9 * output.square().mean()

    batches = [(torch.randn(4, 8), None)]
    assert max(r.underflow for r in calibrate(model, batches, loss, scale=1.0).rows) > 0.5
    found = calibrate(model, batches, loss)
    assert found.scale > 1e3
    assert max(r.underflow for r in found.rows if r.op == "linear") == 0


# ------------------------------------------------------------------------------------------------ bad input


class Endless:
    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((2, 4), float(n)), None) for n in itertools.count())


def test_an_endless_source_is_bounded_and_says_so() -> None:
    model = nn.Linear(4, 1)
    with pytest.warns(AmpWarning, match=r"first 128.*itertools\.islice"):
        found = calibrate(model, Endless(), mean_square)
    assert found.batches == 128
    assert row(found, "linear").operands[0].max_abs == 127


def test_a_bounded_generator_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        assert calibrate(nn.Linear(4, 1), itertools.islice(Endless(), 3), mean_square).batches == 3


@pytest.mark.parametrize("batches", [[], iter(())])
def test_an_empty_source(batches: Any) -> None:
    with pytest.raises(CalibrationError, match=r"empty: pass at least one \(inputs, targets\)"):
        calibrate(nn.Linear(4, 1), batches, mean_square)


@pytest.mark.parametrize(
    ("batches", "message"),
    [(torch.ones(2, 4), r"not Tensor: for a single batch write"), (3, "must be an iterable"),
     ([(1, 2, 3)], "Batch 1 has 3 parts")],
)  # fmt: skip
def test_what_is_no_batches(batches: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        calibrate(nn.Linear(4, 1), batches, mean_square)


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), float("nan"), "2"])
def test_a_scale_that_is_none(scale: Any) -> None:
    with pytest.raises(CalibrationError, match="scale must be a positive number"):
        calibrate(nn.Linear(4, 1), [(torch.ones(2, 4), None)], mean_square, scale=scale)


def test_a_batch_that_fails_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CalibrationError, match=r"batch 2: input is float32\[2, 7\], but float32\[2, 4\] in batch 1"):
        calibrate(model, [torch.ones(2, 4), torch.ones(2, 7)])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert not any(p.requires_grad for p in model.parameters())


class Cancels(nn.Module):
    """The gradient of ``tanh`` is the sum of two 1e4 times as large: of two ops, or of one that reads it twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.fc, self.twice = nn.Linear(4, 4), twice

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.fc(x))
        if self.twice:
            return torch.cat([y, y]) @ torch.eye(4) * torch.cat([torch.full((2, 4), 1e4), torch.full((2, 4), 1 - 1e4)])
        return y * 1e4 + y * (1 - 1e4)


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_that_cancel_in_a_sum(twice: bool) -> None:
    found = calibrate(Cancels(twice), [(torch.ones(2, 4), None)], lambda output, targets: output.sum())
    assert row(found, "tanh").cancellation == pytest.approx(1e4, rel=1e-3)
    assert row(found, "linear", "fc").cancellation == 0.0
    assert calibrate(Cancels(twice), [torch.ones(2, 4)]).rows[0].cancellation == 0.0, "there is no loss"


def test_a_value_that_is_read_twice_by_one_op_has_one_rounding_error() -> None:
    def square(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return (y * y).sum()

    def product(x: Tensor) -> Tensor:
        return (factor * torch.tanh(x)).sum()

    x = torch.tensor([0.3, -0.7, 1.1]).requires_grad_()
    factor = 2 * torch.tanh(x).detach()  # the derivative of the square, so that both have the same gradient
    read_twice, read_once = (row(calibrate(function, [x]), "tanh") for function in (square, product))
    assert read_twice.gradient == read_once.gradient
    assert read_twice.result == read_once.result
    y = torch.tanh(x).detach()
    own = float((factor * (y.half().float() - y)).square().sum())
    assert 0 < own <= read_twice.sensitivity * 1.001, "the errors of the two operands are one error"
