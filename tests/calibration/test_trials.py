"""The trials of a search: what was captured for one policy is used for the next, with the same results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Planted, small_loss
from torch import nn

from amp_compiler import Policy, amp_compile
from amp_compiler.calibration.items import find_work, policy_for
from amp_compiler.runtime.backend import Backend
from amp_compiler.search import _Compiler

X = torch.linspace(-1, 1, 128).reshape(8, 16)
BASE = Policy("O3", torch.float16)


@pytest.fixture
def captures(monkeypatch) -> list[int]:
    """Counts the graphs that Dynamo captures."""
    counts, lowered = [0], Backend.lowered

    def counted(self, gm, example_inputs):
        counts[0] += 1
        return lowered(self, gm, example_inputs)

    monkeypatch.setattr(Backend, "lowered", counted)
    return counts


def results(model, compiled, x=X) -> list[torch.Tensor]:
    """The output and the gradients of all weights."""
    output = compiled(x)
    weights = [p for p in model.parameters() if p.requires_grad]
    return [output.detach(), *torch.autograd.grad(small_loss(output, None), weights)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def switched():
    model = Planted(2, {1: "cancellation"})
    compiler = _Compiler(model)
    first = compiler(BASE)
    results(model, first)
    return model, compiler, find_work(first.graphs, "flops").items


@settings(max_examples=4, deadline=None)
@given(st.sets(st.integers(0, 9)))
def test_every_policy_gives_what_it_gives_when_compiled_anew(switched, numbers):
    model, compiler, items = switched
    policy = policy_for(BASE, [items[i] for i in numbers if i < len(items)])
    made, anew = compiler(policy), amp_compile(model, policy=policy)
    assert same(results(model, made), results(model, anew))
    assert str(made.report()) == str(anew.report())
    assert [graph.code for graph in made.graphs] == [graph.code for graph in anew.graphs]
    assert made.policy == policy


def test_a_policy_needs_no_further_capture(captures):
    model = Planted(1, {})
    compiler = _Compiler(model)
    first = compiler(BASE)
    low = results(model, first)
    items = find_work(first.graphs, "flops").items
    second = compiler(policy_for(BASE, items))
    wide = results(model, second)
    assert captures == [1]
    assert not same(low, wide)
    assert same(wide, results(model, model))
    with torch.no_grad():
        second(X)
    assert captures == [2], "guards still hold: another mode of autograd is another graph"
    assert same(low, results(model, first)), "an earlier model is captured anew"
    assert len(first.graphs) == 1
    assert same(wide, results(model, second))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        return self.b(y)


@pytest.mark.parametrize("kind", ["a graph break", "sizes that vary"])
def test_what_is_not_one_closed_graph_is_captured_anew(captures, kind):
    model = Broken() if kind == "a graph break" else Planted(1, {})
    inputs = [X] if kind == "a graph break" else [X, X[:3]]
    compiler = _Compiler(model)
    first = compiler(BASE)
    for x in inputs:
        results(model, first, x)
    before = captures[0]
    policy = policy_for(BASE, find_work(first.graphs, "flops").items)
    made, anew = compiler(policy), amp_compile(model, policy=policy)
    for x in inputs:
        assert same(results(model, made, x), results(model, anew, x))
    assert captures[0] > before
    assert str(made.report()) == str(anew.report())
