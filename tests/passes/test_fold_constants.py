"""fold_constants: what is made of weights alone is made once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from amp_compiler import Policy
from amp_compiler.common.errors import PipelineError
from amp_compiler.passes.fold_constants import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from conversion_helpers import Weighted
from helpers import BF16, context, same

X = torch.randn(2, 4)


class Made(nn.Module):
    """A linear layer whose weight is made of two by ``make``; ``also`` says what else is read."""

    def __init__(self, make: Any, also: str = "", size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.also = make, also
        self.a, self.b = nn.Parameter(torch.randn(size, 4)), nn.Parameter(torch.randn(size, 4))

    def forward(self, x: Tensor) -> Any:
        y = F.linear(x, self.make(self.a, self.b))
        return (y, y @ getattr(self, self.also)) if self.also else y


def test_a_weight_that_is_computed_is_computed_once() -> None:
    given = Weighted(Made(lambda a, b: a * b.exp()), X)
    before = given()
    given.check(PASS, """
        input p_a_value: f32[4, 4]
        input x: f32[2, 4]
        linear: f32[2, 4] = linear(x, p_a_value)
        return linear
    """, modified=True)  # fmt: skip
    same(given(), before)


def test_weight_norm() -> None:
    given = Weighted(weight_norm(nn.Linear(4, 8)), X)
    before = given()
    given.check(PASS, modified=True)
    same(given(), before)
    assert given.names() == ["linear"]


def test_several_outputs_of_one_op() -> None:
    class Sorted(Made):
        def forward(self, x: Tensor) -> Any:
            values, order = self.a.sort(dim=0)
            return F.linear(x, values), x + order[0]

    given = Weighted(Sorted(None), X)
    before = given()
    given.check(PASS, modified=True)
    same(given(), before)
    assert "sort" not in given.names()


NEAR: dict[str, nn.Module] = {
    "only moved": Made(lambda a, b: a.t().reshape(4, 4).t()),
    "of the input": nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    "random": Made(lambda a, b: a + torch.rand_like(a)),
    "grows": Made(lambda a, b: a.exp().repeat(200, 1), size=8),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_stays(name: str) -> None:
    Weighted(NEAR[name], X).check(PASS, modified=False)


def test_a_large_result_is_not_stored_beside_weights_that_others_read() -> None:
    model = Made(lambda a, b: a.exp(), also="a", size=128)
    given = Weighted(model, X)
    given.check(PASS, modified=False)


def test_a_small_one_is() -> None:
    given = Weighted(Made(lambda a, b: a.exp(), also="a"), X)
    before = given()
    given.check(PASS, modified=True)
    assert set(given.dtypes()) == {"a", "a_value"}
    same(given(), before)


def test_what_is_written_to_is_no_constant() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.n.add_(1)
            return x * self.n.exp()

    Weighted(Counts(), X).check(PASS, modified=False)


@pytest.mark.parametrize("policy", [Policy("O0", BF16), Policy.torch("cpu", BF16)])
def test_what_must_stay_as_it_is_stays(policy: Policy) -> None:
    Weighted(Made(lambda a, b: a * b), X, policy=policy).check(PASS, modified=False)


def test_without_weights_it_does_nothing() -> None:
    assert PASS.run(Weighted(Made(lambda a, b: a * b), X).gm, context()) is False


def test_it_needs_a_normalized_graph() -> None:
    with pytest.raises(PipelineError, match="needs 'normalized'"):
        Pipeline((PASS,), (facts.CAPTURED,))


OPS = [torch.mul, torch.add, torch.maximum, lambda a, b: a @ b, lambda a, b: a.softmax(-1) - b]


@given(st.lists(st.sampled_from(OPS), min_size=1, max_size=3))
@settings(max_examples=8)
def test_no_value_changes(steps: list[Any]) -> None:
    def make(a: Tensor, b: Tensor) -> Tensor:
        for step in steps:
            a = step(a, b)
        return a

    given = Weighted(Made(make), X)
    before = given()
    given.check(PASS, modified=True)
    same(given(), before)
    assert given.names() == ["linear"]
