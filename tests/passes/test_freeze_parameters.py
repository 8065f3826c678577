"""freeze_parameters: each weight is stored in the precision that its readers want, and no value changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler.common.errors import PipelineError, VerifyError
from amp_compiler.passes.freeze_parameters import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.verify import verify
from conversion_helpers import Weighted, stored_casts
from helpers import BF16, F16, F32, LOW, context, find, same

X = torch.linspace(-2, 2, 8).view(2, 4)


class Uses(nn.Module):
    """One weight, read in the ways that are named."""

    def __init__(self, *ways: str, value: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = ways
        self.w = nn.Parameter(torch.randn(4, 4) if value is None else value)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for way in self.ways:
            if way == "low":
                found.append(F.linear(x, self.w))
            elif way == "fp32":
                found.append(torch.exp(self.w).sum())
            elif way == "moved":
                found.append(x @ self.w.t().reshape(4, 4))
            elif way == "looked up":
                found.append(F.embedding(torch.tensor([1, 3, 1]), self.w) * 2)
            elif way == "both moved":
                turned = self.w.t()
                found += [x @ turned, turned.exp().sum()]
        return found


def checked(*ways: str, dtype: torch.dtype = BF16, value: Tensor | None = None) -> Weighted:
    given = Weighted(Uses(*ways, value=value), X, cast=True, dtype=dtype)
    before = given()
    given.check(PASS)
    same(given(), before)
    assert not stored_casts(given.gm, given.weights)
    return given


def test_a_weight_that_is_only_read_low_is_stored_low() -> None:
    before = Weighted(Uses("low"), X, cast=True)
    expected = before()
    before.check(PASS, """
        input p_w: bf16[4, 4]
        input x: f32[2, 4]
        x_bf16: bf16[2, 4] = cast(x, bf16)
        linear: bf16[2, 4] = linear(x_bf16, p_w)
        linear_f32: f32[2, 4] = cast(linear, f32)
        return linear_f32
    """, modified=True)  # fmt: skip
    same(before(), expected)


def test_a_weight_that_is_read_in_both_precisions_is_stored_in_both_once() -> None:
    given = checked("low", "low", "fp32", "fp32")
    assert given.dtypes() == {"w": F32, "w_bf16": BF16}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("way", ["moved", "looked up"])
def test_a_rounding_behind_ops_that_move_values_is_done_at_conversion(way: str, low: torch.dtype) -> None:
    assert checked(way, dtype=low).dtypes()["w"] is low


def test_a_moved_weight_that_is_read_in_both_precisions_is_moved_in_both() -> None:
    given = checked("both moved")
    assert given.dtypes() == {"w": F32, "w_bf16": BF16}
    assert given.names().count("t") == 2


@pytest.mark.parametrize("level", ["O2", "auto"])
def test_a_table_that_is_read_in_both_precisions_is_stored_once(level: str) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)
            self.fc = nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            rows = self.table(ids)
            return rows.float().exp(), self.fc(rows)

    given = Weighted(Rows(), torch.tensor([1, 5]), cast=True, level=level)
    before = given()
    given.check(PASS)
    same(given(), before)
    # O2's parameters are low; at auto they are fp32, and two rows cost less to round than a second table
    assert given.dtypes()["table.weight"] is (BF16 if level == "O2" else F32)
    assert len(given.dtypes()) == 3


def test_a_weight_that_stays_fp32_is_left_alone() -> None:
    given = Weighted(Uses("fp32"), X, cast=True)
    given.check(PASS, modified=False)
    assert given.dtypes() == {"w": F32}


def test_a_weight_that_nothing_reads_is_not_stored() -> None:
    model = nn.BatchNorm1d(4)
    given = Weighted(model, X, cast=True).check(PASS)
    assert set(given.dtypes()) == {"weight", "bias", "running_mean", "running_var"}


@pytest.mark.parametrize("value", [70000.0, -70000.0, 1e-9])
def test_a_weight_that_fp16_cannot_hold_stays_fp32_and_is_named(value: float) -> None:
    weight = torch.full((4, 4), 0.5 if abs(value) > 1 else 0.0)
    weight[1, 2] = value
    model = Uses("low", value=weight)
    given = Weighted(copy.deepcopy(model), X, cast=True, dtype=F16)
    given.check(PASS)
    assert given.dtypes() == {"w": F32}
    assert "w" in given.weights.kept
    assert f"{abs(value):g}" in given.weights.kept["w"]
    same(given(), [F.linear(X, model.w.detach())])  # the op is fp32 too
    # bf16 has the range of fp32
    assert Weighted(model, X, cast=True, dtype=BF16).check(PASS).dtypes() == {"w": BF16}


def test_only_all_of_it_rounding_to_zero_counts() -> None:
    weight = torch.full((4, 4), 1e-9)
    weight[0, 0] = 1.0
    assert checked("low", dtype=F16, value=weight).dtypes() == {"w": F16}


def test_infinities_are_held_by_every_dtype() -> None:
    weight = torch.zeros(4, 4)
    weight[0, 0] = -float("inf")
    assert checked("low", dtype=F16, value=weight).dtypes() == {"w": F16}


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return F.linear(x, self.seen)


def test_what_is_written_to_is_no_weight() -> None:
    given = Weighted(Writes(), X, cast=True)
    given.check(PASS, modified=False)
    assert given.dtypes() == {"seen": F32}


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.w), self.w


def test_a_weight_that_is_returned_is_returned_as_it_is() -> None:
    model = Returns()
    given = Weighted(model, X, cast=True).check(PASS)
    assert given.dtypes() == {"w": F32, "w_bf16": BF16}
    assert torch.equal(given()[1], model.w)


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) * 2)


def test_tied_weights_stay_tied() -> None:
    from amp_compiler import convert_model

    ids = torch.tensor([[1, 2, 7]])
    program = convert_model(Tied().eval(), (ids,), dtype=BF16).exported_program
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in program.state_dict.values()}
    assert sum(sizes.values()) == 8 * 4 * 2


def test_without_weights_it_does_nothing() -> None:
    given = Weighted(Uses("low"), X, cast=True)
    assert PASS.run(given.gm, context()) is False


def test_it_needs_casts() -> None:
    with pytest.raises(PipelineError, match="needs 'cast'"):
        Pipeline((PASS,), (facts.CAPTURED,))


def test_a_rounding_that_is_left_is_found() -> None:
    given = Weighted(Uses("low"), X, cast=True)
    with pytest.raises(VerifyError, match="rounds the weight w each time"):
        verify(given.gm, (facts.FROZEN,), given.ctx, "nothing")


WAYS = st.lists(st.sampled_from(["low", "fp32", "moved", "looked up", "both moved"]), min_size=1, max_size=5)


@given(WAYS, st.sampled_from(LOW), st.floats(-9, 9))
@settings(max_examples=10)
def test_no_value_changes_and_no_rounding_is_left(ways: list[str], low: torch.dtype, exponent: float) -> None:
    torch.manual_seed(0)
    given = Weighted(Uses(*ways, value=torch.randn(4, 4) * 10**exponent), X, cast=True, dtype=low)
    before: Any = given()
    given.check(PASS)
    same(given(), before)
    if not given.weights.kept:
        assert not stored_casts(given.gm, given.weights)
    assert len([d for d in given.dtypes().values() if d.is_floating_point]) <= 2
    assert find(given.gm, "x").meta["val"].dtype is F32


class Branches(nn.Module):
    """Two weights in a ``cond``; one is also read in fp32 by a branch."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        def yes(x: Tensor) -> Tensor:
            return F.linear(x, self.a) + (self.b.exp().sum() if self.mixed else 0)

        return torch.cond(x.sum() > 0, yes, lambda x: F.linear(x, self.b), (x,))


@pytest.mark.parametrize("mixed", [False, True])
def test_weights_that_a_cond_hands_to_its_branches(mixed: bool) -> None:
    given = Weighted(Branches(mixed), X, cast=True)
    before = given(X + 5), given(X - 5)
    given.check(PASS, modified=True)
    same((given(X + 5), given(X - 5)), before)
    assert given.dtypes() == {"a": BF16, "b": F32 if mixed else BF16}
