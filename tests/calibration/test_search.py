"""``search_policy`` without a compiler, which makes it fast: its trials, bad input, journals."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from functools import partial

import pytest
import torch
from planted import Planted, expected, planted, small_loss
from torch import nn

import amp_compiler.search as front
from amp_compiler import (
    AmpWarning,
    ArgumentError,
    CalibrationError,
    Policy,
    SearchError,
    amp_compile,
    calibrate,
    search_policy,
)
from amp_compiler.calibration.items import find_work
from amp_compiler.cost.model import CostModel
from amp_compiler.cost.table import DEVICES

X = torch.linspace(-1, 1, 128).reshape(8, 16)


class Pretended:
    """Stands for the compiler: a compiled model is its policy, and has the graphs of a real one."""

    def __init__(self, graphs) -> None:
        self.graphs, self.made = graphs, 0

    def __call__(self, model, policy):
        self.made += 1
        result = type("Compiled", (), {})()
        result.graphs, result.policy = self.graphs, policy
        result.fp32 = {str(rule) for rule in policy.calls}
        return result


@pytest.fixture(scope="module")
def graphs():
    real = amp_compile(Planted(5, {}).eval(), level="O3", dtype=torch.float16)
    real(X)
    return real.graphs


@pytest.fixture
def pretended(graphs, monkeypatch):
    compiler = Pretended(graphs)
    monkeypatch.setattr(front, "_Compiler", lambda model: partial(compiler, model))
    return Planted(5, {}).eval(), compiler


BAD = {"blocks.0:tanh#0", "blocks.4.fc:linear#0"}


def bad_ops(compiled) -> float:
    """A metric that two ops break."""
    return 0.0 if compiled.policy.level == "O0" else float(len(BAD - compiled.fp32))


def search_bad(model, evaluate=bad_ops, **options):
    return search_policy(model, evaluate, **{"tolerance": 0.5, "maximize": False, **options})


def test_the_pretended_compiler(pretended):
    search = search_bad(pretended[0])
    assert set(search.blamed) == BAD == {str(rule) for rule in search.policy.calls}


@pytest.mark.parametrize("device", ["t4", DEVICES["t4"]])
def test_the_time_on_a_device_as_the_objective(graphs, device):
    """A product is worth the seconds that it saves there, and a GPU saves none on ops that only launch."""
    work = find_work(graphs, device)
    model = CostModel(DEVICES["t4"])
    nodes = {node.name: node for node in graphs[0].graph.nodes}
    for item in work.items:
        seconds = [model.seconds(nodes[item.node], dtype) for dtype in (torch.float32, torch.float16)]
        assert item.cost == pytest.approx(max(seconds[0] - seconds[1], 0.0))
    assert 0 < work.share(i for i in work.items if i.op == "linear") <= 1
    assert work.share(work.items) == 1.0


def test_a_search_for_the_time_on_a_device(pretended):
    search = search_bad(pretended[0], objective="t4")
    assert set(search.blamed) == BAD
    assert search.objective == "t4"
    assert 0 < search.share < 1
    assert f"{search.share:.1%} of the time that low precision saves on t4" in str(search)
    assert "saves on t4" in search.to_svg()


KINDS = {1: ("weights",), 2: ("gradients",), 3: ("plateau",), 4: ("gradients", "cancellation"),
         5: ("activations", "plateau"), 6: ("weights", "activations", "gradients")}  # fmt: skip


@pytest.mark.parametrize(("number", "ops"), [(4, 80), *(pytest.param(n, 200, marks=pytest.mark.zoo) for n in KINDS)])
def test_faults_among_many_ops(number, ops, monkeypatch):
    """The network and its calibration are real, and only the compiler is not: a trial fails if an op of a fault is low.
    ``benchmarks/search.py`` compiles and runs them all."""
    model, faults = planted(ops, KINDS[number])
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    real = amp_compile(model, level="O3", dtype=torch.float16)
    real(x)
    calibration = calibrate(model, [(x, None)], small_loss, scale=1.0)
    monkeypatch.setattr(front, "_Compiler", lambda model: partial(Pretended(real.graphs), model))
    wanted = expected(faults, gradients="gradients" in KINDS[number])

    def failing(compiled):
        return 0.0 if compiled.policy.level == "O0" else float(len(wanted - compiled.fp32))

    search = search_bad(model, failing, calibration=calibration)
    assert len(wanted) == number
    assert len(search.items) >= ops - 5
    assert {name for name, _ in search.reasons} == wanted
    assert search.evaluations <= 20
    without = search_bad(model, failing, budget=200)
    assert {name for name, _ in without.reasons} == wanted
    if number <= 5:  # a sixth fault, whose gradients cancel, takes 51
        assert without.evaluations <= 40


@pytest.mark.parametrize(("value", "words"), [
    (None, "returned NoneType on the fp32 model"), ("0.9", "returned str"), (torch.ones(3), "returned Tensor"),
    (math.nan, "gives nan for the fp32 model"), (math.inf, "Bound the metric"),
])  # fmt: skip
def test_an_evaluate_that_returns_no_number(pretended, value, words):
    with pytest.raises(SearchError, match=words):
        search_bad(pretended[0], lambda compiled: value)


def test_nan_in_a_trial_is_a_failure(pretended):
    search = search_bad(pretended[0], lambda c: math.nan if bad_ops(c) else 0.0)
    assert set(search.blamed) == BAD


def test_an_evaluate_that_raises_loses_nothing(pretended, tmp_path):
    model, compiler = pretended
    calls = itertools.count()

    def evaluate(compiled):
        if next(calls) == 6:
            raise ValueError("the data is gone")
        return bad_ops(compiled)

    path = tmp_path / "journal.jsonl"
    with pytest.raises(SearchError, match=r"ValueError: the data is gone.*6 evaluations are in") as caught:
        search_bad(model, evaluate, journal=path)
    assert isinstance(caught.value.__cause__, ValueError)
    made = compiler.made
    search = search_bad(model, evaluate, journal=path)
    assert set(search.blamed) == BAD
    fresh = search_bad(model)
    assert search.evaluations == fresh.evaluations
    assert [t.values for t in search.trials] == [t.values for t in fresh.trials]
    assert compiler.made - made < 2 * fresh.evaluations - 4, "what is in the journal is not evaluated again"


@pytest.mark.parametrize("stop", range(1, 12, 3))
def test_a_search_that_is_killed_continues(pretended, tmp_path, stop):
    model, _ = pretended
    path, calls = tmp_path / "journal.jsonl", itertools.count(1)

    def killed(compiled):
        if next(calls) == stop:
            raise KeyboardInterrupt
        return bad_ops(compiled)

    with pytest.raises(KeyboardInterrupt):
        search_bad(model, killed, journal=path)
    total = []
    search = search_bad(model, lambda c: total.append(0) or bad_ops(c), journal=path)
    fresh = search_bad(model)
    assert (search.policy, search.evaluations) == (fresh.policy, fresh.evaluations)
    assert len(total) == fresh.evaluations - stop + 1
    again = search_bad(model, lambda c: pytest.fail("evaluated again"), journal=path)
    assert again.policy == fresh.policy


def test_a_journal_of_other_weights(pretended, tmp_path):
    model, _ = pretended
    path = tmp_path / "journal.jsonl"
    search_bad(model, journal=path)
    with torch.no_grad():
        model.blocks[0].fc.bias += 1
    with pytest.raises(SearchError, match=r"another search .with another model"):
        search_bad(model, journal=path)


def test_an_evaluate_that_changes_the_model(pretended):
    model, _ = pretended
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []

    def evaluate(compiled):
        seen.append(float(model.blocks[0].fc.bias.detach().sum()))
        model.eval()
        with torch.no_grad():
            model.blocks[0].fc.bias += 1
            model.blocks[1].fc.weight.fill_(math.nan)
        return bad_ops(compiled)

    with pytest.warns(AmpWarning, match=r"evaluate changed blocks.0.fc.bias and 1 more") as caught:
        search = search_bad(model, evaluate)
    assert len(caught) == 1
    assert len(set(seen)) == 1, "every trial starts alike"
    assert set(search.blamed) == BAD
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("before", [None, 3.0])
def test_gradients_of_one_evaluation_are_gone_in_the_next(pretended, before):
    model, _ = pretended
    bias = model.blocks[0].fc.bias
    bias.grad = None if before is None else torch.full_like(bias, before)
    given, seen = bias.grad, []

    def evaluate(compiled):
        bias.sum().backward()
        seen.append(float(bias.grad[0]))
        return bad_ops(compiled)

    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        search_bad(model, evaluate)
    assert set(seen) == {1.0 + (before or 0.0)}
    assert bias.grad is given
    assert given is None or set(given.tolist()) == {before}


def test_an_evaluate_that_replaces_a_parameter(pretended):
    model, _ = pretended

    def evaluate(compiled):
        model.blocks[0].fc = nn.Linear(16, 8)
        return 0.0

    with pytest.raises(SearchError, match=r"evaluate replaced 'blocks.0.fc.weight'"):
        search_bad(model, evaluate)


def test_a_noisy_metric(pretended):
    noise = random.Random(0)
    search = search_bad(pretended[0], lambda c: bad_ops(c) + noise.gauss(0, 0.05), budget=200)
    assert {name for name, _ in search.reasons} >= BAD
    assert len(search.reasons) <= len(BAD) + 2
    assert search.confidence == 0.95
    assert len(search.trials[-1].values) == 5
    assert "with 95% confidence" in str(search)


def test_a_metric_that_is_too_noisy(pretended):
    noise = random.Random(0)
    with pytest.raises(SearchError, match=r"varies from run to run.*tolerance of at least"):
        search_bad(pretended[0], lambda c: noise.gauss(0, 5))


def test_a_result_that_does_not_hold_again_is_not_returned(pretended):
    """The metric changes after the search: nothing that was found before holds any more."""
    calls = []

    def evaluate(compiled):
        calls.append(compiled.fp32)
        return bad_ops(compiled) if calls.count(compiled.fp32) == 1 or compiled.policy.level == "O0" else 9.0

    with pytest.warns(AmpWarning, match="did so again"):
        search = search_bad(pretended[0], evaluate)
    assert not search.verified
    assert search.policy == Policy("O0", torch.float16)
    assert search.metric == search.baseline


@pytest.mark.parametrize("budget", range(4, 14))
def test_a_budget_that_is_used_up(pretended, budget):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search = search_bad(pretended[0], budget=budget)
    assert search.evaluations <= budget
    assert {name for name, _ in search.reasons} >= BAD
    if not search.complete:
        assert f"budget of {budget} evaluations is used up" in str(caught[0].message)
    if search.verified:
        assert search.trials[-1].holds
        assert search.trials[-1].purpose == "verification"


def test_everything_fails(pretended):
    with pytest.warns(AmpWarning, match="everything in fp32"):
        search = search_bad(pretended[0], lambda c: float(c.policy.level != "O0"), budget=100)
    assert search.policy == Policy("O0", torch.float16)


def test_an_evaluate_that_does_not_run_the_model(pretended):
    model, compiler = pretended
    compiler.graphs = []
    with pytest.raises(SearchError, match="did not run the model"):
        search_bad(model, lambda compiled: 1.0)


def test_a_calibration_of_another_model(pretended):
    other = calibrate(nn.Linear(4, 4), [(torch.ones(2, 4), None)])
    with pytest.raises(CalibrationError, match="made for another one"):
        search_bad(pretended[0], calibration=other)


@pytest.mark.parametrize(("options", "words"), [
    ({"tolerance": -1}, "tolerance"), ({"tolerance": math.nan}, "tolerance"), ({"tolerance": "1"}, "tolerance"),
    ({"budget": 1}, "budget"), ({"budget": 5.0}, "budget"), ({"objective": "speed"}, "flops, bytes, or a device"),
    ({"objective": 3}, "or a device"),
    ({"maximize": 1}, "maximize"), ({"level": "O0"}, "nothing to search"), ({"level": "O9"}, "Unknown level"),
    ({"dtype": torch.float32}, "dtype"), ({"calibration": {}}, "calibration"), ({"evaluate": 3}, "evaluate"),
])  # fmt: skip
def test_wrong_arguments(options, words):
    with pytest.raises(ArgumentError, match=words):
        search_bad(nn.Linear(2, 2), **options)


def test_what_is_not_a_model():
    with pytest.raises(ArgumentError, match=r"module\.original"):
        search_bad(amp_compile(nn.Linear(2, 2)))
    with pytest.raises(ArgumentError, match="not function"):
        search_bad(lambda x: x)
