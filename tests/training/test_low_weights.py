"""``compile_train_step(master_weights=...)``: models whose parameters are stored in fp16 or bf16."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler, amp_compile, compile_train_step
from amp_compiler.common.errors import AmpWarning, ArgumentError, CheckpointError
from amp_compiler.kernels import cpu
from amp_compiler.training.masters import COMPENSATION, MASTER
from amp_compiler.training.step import TrainStep
from helpers import BF16, F16, F32

METHODS: tuple[Any, ...] = (True, "stochastic", "kahan")


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


class Words(nn.Module):
    """Layers that O2 runs in low precision: an embedding, tied to the last layer, and two more products."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.hidden = nn.Linear(16, 32)
        self.back = nn.Linear(32, 16)
        self.last = nn.Linear(16, 11)
        self.last.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.back(F.gelu(self.hidden(self.embedding(words)))))


def model(dtype: torch.dtype, *, wide: bool = False) -> Words:
    """Values that the dtype can represent; ``wide``: the same in fp32."""
    torch.manual_seed(0)
    made = Words().to(dtype)
    return made.float() if wide else made


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), targets)


def batch(number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(number)
    words = torch.randint(0, 11, (24,), generator=source)
    return words, (3 * words + 1) % 11


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003)


def make(net: nn.Module, dtype: torch.dtype = BF16, optimizer: Any = adamw, **options: Any) -> TrainStep:
    return compile_train_step(net, loss, optimizer(net.parameters()), dtype=dtype, **options)


def train(step: TrainStep, numbers: range = range(4)) -> list[float]:
    return [float(step(*batch(number)).loss) for number in numbers]


def values(step: TrainStep) -> dict[str, Any]:
    """All that a step keeps: weights, the optimizer's state, and what the rounding needs."""
    found = {f"model.{name}": t.clone() for name, t in step.model.state_dict().items()}
    for number, entries in step.optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{number}.{key}": copy.deepcopy(value) for key, value in entries.items()}
    return found | {f"rounding.{device}": t for device, t in step.state_dict().get("rounding", {}).items()}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name


# --------------------------------------------------------------------------------- nothing is lost, and how exactly


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (F16, {}),
        (BF16, {"accumulate_steps": 2, "max_grad_norm": 0.1}),
        pytest.param(BF16, {"loss_scaler": None}, marks=pytest.mark.trainers),
    ],
    ids=str,
)  # fmt: skip
def test_masters_are_the_weights_of_the_fp32_model(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """O2 rounds an fp32 model's weights where it reads them, so both compute the same, bit for bit."""
    low, wide = make(model(dtype), dtype, **options), make(model(dtype, wide=True), dtype, **options)
    assert train(low) == train(wide)
    theirs = dict(wide.model.named_parameters())
    for name, parameter in low.model.named_parameters():
        master, gradient = low.optimizer.state[parameter][MASTER], theirs[name].grad
        assert torch.equal(master, theirs[name]), name
        assert torch.equal(parameter, master.to(dtype)), name
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient.to(dtype)), name
    assert low.optimizer.param_groups[0]["params"][0] is low.model.embedding.weight  # type: ignore[union-attr]


def test_an_fp32_model_has_the_graphs_it_always_had() -> None:
    steps = [make(model(BF16, wide=True), master_weights=method) for method in (True, False)]
    for step in steps:
        train(step, range(1))
    assert [(r.name, r.text) for r in steps[0].history] == [(r.name, r.text) for r in steps[1].history]
    same(values(steps[0]), values(steps[1]))


STEPS = 5
NORM_INPUT = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
NORM_FACTOR = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


class Normed(nn.Module):
    """32 weights, all of them 1 at the beginning. The loss is linear in them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.to(self.norm.weight.dtype))


RATES = {torch.optim.SGD: 2e-4, torch.optim.AdamW: 1e-3}
#: how far a weight may be from that of the fp32 run, in distances of two bf16 numbers. Masters and a compensated weight
#: are rounded once; the compensation itself is rounded to 8 bits in each step; stochastic rounding errs by less than
#: one unit in each step.
BOUNDS: dict[Any, float] = {True: 0.5, "kahan": 0.5 + STEPS * 2.0**-8, "stochastic": STEPS}


@pytest.fixture(scope="module")
def normed(monkeypatch_module: pytest.MonkeyPatch) -> dict[Any, dict[type, Tensor]]:
    """By method ("fp32": the model in fp32), and by optimizer: the weights after a few steps."""
    found: dict[Any, dict[type, Tensor]] = {}
    monkeypatch_module.setenv(cpu.SETTING, "wide")
    for method in ("fp32", False, *METHODS):
        net = Normed() if method == "fp32" else Normed().bfloat16()
        options = {"master_weights": True if method == "fp32" else method}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AmpWarning)
            step = compile_train_step(net, lambda y, t: (y.float() * t).sum(), torch.optim.SGD(net.parameters()),
                                      dtype=BF16, **options)  # fmt: skip
        for make_optimizer, rate in RATES.items():
            nn.init.ones_(net.norm.weight)
            step.optimizer = make_optimizer(net.parameters(), lr=rate)
            for _ in range(STEPS):
                step(NORM_INPUT, NORM_FACTOR)
            found.setdefault(method, {})[make_optimizer] = net.norm.weight.detach().clone()
    return found


@pytest.mark.parametrize("optimizer", RATES)
def test_a_layer_norm_that_would_not_move(normed: dict[Any, dict[type, Tensor]], optimizer: type) -> None:
    wide = normed["fp32"][optimizer]
    assert int((normed[False][optimizer] != 1).sum()) == 0
    assert int((wide != 1).sum()) == 32
    slope = (F.layer_norm(NORM_INPUT, (32,)) * NORM_FACTOR).sum(0)  # of the loss, by weight
    # the gradients themselves are sums of bf16 numbers, each rounded twice, and rounded once more
    rounded = (F.layer_norm(NORM_INPUT, (32,)) * NORM_FACTOR).abs().sum(0) * 3 * torch.finfo(BF16).eps
    updates = RATES[optimizer] * STEPS * (rounded if optimizer is torch.optim.SGD else torch.finfo(BF16).eps)
    for method, units in BOUNDS.items():
        low = normed[method][optimizer].float()
        assert bool((low != 1).any()), method
        allowed = torch.as_tensor(units * torch.finfo(BF16).eps + updates).expand(32)
        assert bool(((low - wide).abs() <= allowed).all()), method
        assert abs(float((low - wide) @ slope)) <= float(allowed @ slope.abs()), method
    if optimizer is torch.optim.AdamW:
        assert int((normed[True][optimizer] != 1).sum()) == 32


# ------------------------------------------------------------------------------------------- all kinds of models


class Broken(nn.Module):
    """A graph break, a frozen low parameter, one that is never used, and one in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, dtype=F16), nn.Linear(8, 2, dtype=F16)
        self.frozen = nn.Parameter(torch.ones(8, dtype=F16), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3, dtype=F16))
        self.wide = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.frozen
        torch._dynamo.graph_break()
        return self.last(hidden).float() * self.wide


def test_pieces_frozen_unused_and_fp32_parameters() -> None:
    torch.manual_seed(0)
    net = Broken()
    start = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    scaler = DynamicLossScaler(2.0**10)
    step = compile_train_step(net, F.mse_loss, optimizer, dtype=F16, loss_scaler=scaler)
    with pytest.warns(AmpWarning, match="pieces"):
        step(torch.randn(4, 4, dtype=F16), torch.randn(4, 2))
    kept = {name: MASTER in optimizer.state.get(p, {}) for name, p in net.named_parameters()}
    assert kept == {"first.weight": True, "first.bias": True, "last.weight": True, "last.bias": True,
                    "frozen": False, "unused": False, "wide": False}  # fmt: skip
    for name, p in net.named_parameters():
        if kept[name]:
            assert p.grad is not None
            assert p.grad.dtype == F16  # of another dtype, Dynamo would trace the parameter no more
            assert not torch.equal(optimizer.state[p][MASTER], start[name].float()), name
    assert not torch.equal(net.wide, start["wide"])
    assert torch.equal(net.unused, start["unused"])
    # an overflow, and its explanations
    before = copy.deepcopy(optimizer.state_dict()["state"])
    scaler.update(2.0**40)
    assert bool(step(torch.randn(4, 4, dtype=F16), torch.randn(4, 2)).skipped)
    assert step.explain_overflow().phase == "backward"
    assert not step.explain_underflow()
    for number, entries in optimizer.state_dict()["state"].items():
        assert torch.equal(entries[MASTER], before[number][MASTER])


def test_loaded_weights_are_not_overwritten() -> None:
    """Masters follow what somebody else writes to the parameters, by whatever way, and only there."""
    step = make(model(BF16), optimizer=lambda p: torch.optim.SGD(p, lr=1e-4))
    train(step, range(1))
    other = {name: t + 0.5 for name, t in step.model.state_dict().items()}
    step.model.load_state_dict(other)
    train(step, range(1))
    for name, parameter in step.model.named_parameters():
        master = step.optimizer.state[parameter][MASTER]
        assert 0 < float((master - other[name].float()).abs().max()) < 0.05, name  # one update away
        assert torch.equal(parameter, master.to(BF16)), name
    twin = copy.deepcopy(step)
    assert train(twin) == train(step)
    same(values(twin), values(step))


# ---------------------------------------------------------------------------------------------------- checkpoints


def linear(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=BF16).to(dtype)


def small(method: Any) -> TrainStep:
    net = linear(F32 if method == "fp32" else BF16)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        return compile_train_step(net, lambda y, t: F.mse_loss(y.float(), t), optimizer, dtype=BF16, accumulate_steps=2,
                                  master_weights=True if method == "fp32" else method)  # fmt: skip


def advance(step: TrainStep, numbers: range) -> None:
    for number in numbers:
        source = torch.Generator().manual_seed(number)
        x = torch.randn(4, 3, generator=source).to(step.model.weight.dtype)  # type: ignore[union-attr,arg-type]
        step(x, torch.randn(4, 2, generator=source))


def saved(step: TrainStep) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def runs(monkeypatch_module: pytest.MonkeyPatch) -> dict[Any, tuple[TrainStep, dict[str, Any], dict[str, Any]]]:
    """By method: a step, its checkpoint in the middle of an update, and what it had some steps later."""
    found = {}
    monkeypatch_module.setenv(cpu.SETTING, "wide")
    for method in ("fp32", False, *METHODS):
        step = small(method)
        advance(step, range(7))
        state = saved(step)
        advance(step, range(7, 12))
        found[method] = step, state, values(step)
    return found


Runs = dict[Any, tuple[TrainStep, dict[str, Any], dict[str, Any]]]


@pytest.mark.parametrize("method", ["fp32", False, *METHODS])
def test_a_run_continues_bit_for_bit(runs: Runs, method: Any) -> None:
    step, state, later = runs[method]
    for run in (step, small(method)) if method == "stochastic" else (step,):
        run.load_state_dict(state)
        advance(run, range(7, 12))
        same(values(run), later)


def exact(state: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a checkpoint with all the digits that it has."""
    found = {}
    for number, name in enumerate(("weight", "bias")):
        kept = state["optimizer"]["state"].get(number, {})
        rest = kept.get(COMPENSATION, torch.zeros(()))
        found[name] = kept.get(MASTER, state["model"][name].float() + rest.float())
    return found


@pytest.mark.parametrize("there", ["fp32", False, *METHODS])
def test_checkpoints_of_other_methods_and_dtypes(runs: Runs, there: Any) -> None:
    state = runs[there][1]
    wanted = exact(state)
    momenta = [entries["momentum_buffer"] for entries in state["optimizer"]["state"].values()]
    for here in ("fp32", False, *METHODS):
        step = runs[here][0]
        step.load_state_dict(state)
        for number, (name, parameter) in enumerate(step.model.named_parameters()):
            assert torch.equal(parameter, wanted[name].to(parameter.dtype)), (here, name)
            entries = step.optimizer.state[parameter]
            dtype = BF16 if here is False else F32
            assert torch.equal(entries["momentum_buffer"].to(dtype), momenta[number].to(dtype)), here
            assert parameter.grad is not None
            assert parameter.grad.dtype == dtype
        advance(step, range(7, 8))  # the second half of an update
        assert step._window.done == 0
        if here is True:
            for name, parameter in step.model.named_parameters():
                far = (step.optimizer.state[parameter][MASTER] - wanted[name]).abs().max()
                assert 0 < far < 0.01  # one update away from the exact value, of the digits of which none was lost


def test_a_checkpoint_that_does_not_fit_changes_nothing(runs: Runs) -> None:
    step = runs["stochastic"][0]
    before = values(step)
    for key, value in (("rounding", {"cpu": torch.zeros(3, dtype=torch.uint8)}), ("model", {})):
        state = {**runs["stochastic"][1], key: value}
        with pytest.raises(CheckpointError):
            step.load_state_dict(state)
    state = copy.deepcopy(runs["stochastic"][1])
    state["rounding"]["cpu"][:] = 255
    with pytest.raises(CheckpointError, match="generator"):
        step.load_state_dict(state)
    same(values(step), before)


# ------------------------------------------------------------------------------------------------------- messages


def test_what_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMP_LOGS", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in METHODS:
            make(model(F16), master_weights=method)
            told = capsys.readouterr().err
            assert "parameters are float16" in told
            assert f"(master_weights={method!r})" in told
        make(model(F16, wide=True))
        assert capsys.readouterr().err == ""
        step = make(model(BF16), dtype=F16)
        told = capsys.readouterr().err
        assert "stays bfloat16: for float16, convert the model first, by model.float() or model.half()" in told
        train(step, range(1))
        assert "float16" not in step.report().by_precision
        assert step.report().by_precision["bfloat16"] > 0
    with pytest.warns(AmpWarning, match='float16: with master_weights=False, small updates are lost.*"stochastic"'):
        make(model(F16), master_weights=False)
    for wrong in ("Kahan", 1, None, "true"):
        with pytest.raises(ArgumentError, match="master_weights is True, False"):
            make(model(F16), master_weights=wrong)


def test_amp_compile_warns_once_of_low_parameters_that_are_trained() -> None:
    x = torch.ones(1, 3, dtype=BF16)
    compiled = amp_compile(linear(BF16), dtype=BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            compiled(x)
        compiled.eval()(x)
        amp_compile(linear(BF16).requires_grad_(False), dtype=BF16)(x)
    with pytest.warns(AmpWarning, match="bfloat16 and are trained.*compile_train_step") as told:
        compiled.train()(x)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x.expand(2, 3))
