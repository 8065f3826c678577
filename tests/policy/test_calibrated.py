"""``Policy.calibrated``: what measured ranges ask for, with reasons in figures."""

from __future__ import annotations

import dataclasses
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import (
    AmpWarning,
    ArgumentError,
    Calibration,
    CallRule,
    Policy,
    PolicyError,
    amp_compile,
    calibrate,
)  # fmt: skip
from amp_compiler.calibration.row import Row
from amp_compiler.runtime.record import Range

LOW = 1e-9  # a sensitivity


def made(*rows: Row, scale: float = 1.0) -> Calibration:
    return Calibration(rows, torch.float16, scale, 3, "Net", True)


def linear(largest: float, **fields: Any) -> Row:
    return Row("linear", "linear", "fc", "", Range(12, largest, min(largest, 1e-2), batch=3), LOW, **fields)


def rules(*rows: Row, level: str = "O2", margin: float = 2.0, scale: float = 1.0) -> tuple[CallRule, ...]:
    return Policy.calibrated(made(*rows, scale=scale), level, margin=margin).calls


def test_values_that_do_not_fit_go_to_fp32() -> None:
    (rule,) = rules(linear(1.2e6))
    assert rule == CallRule("fc", "linear", "float32", None, "reaches 1.2e+06 in batch 3; fp16 holds 65504")


def test_the_margin() -> None:
    assert rules(linear(32000.0)) == ()
    (rule,) = rules(linear(33000.0))
    assert rule.reason == "reaches 3.3e+04 in batch 3; fp16 holds 65504, with a margin of 2"
    assert rules(linear(33000.0), margin=1.5) == ()


def test_operands_that_do_not_fit() -> None:
    (rule,) = rules(linear(1.0, operands=(Range(4, 1.0, 1.0), Range(4, 1e5, 1.0, batch=2))))
    assert rule.reason == "reads values up to 1e+05 in batch 2; fp16 holds 65504"


def test_values_that_are_too_small() -> None:
    (rule,) = rules(linear(1e-8))
    assert rule.reason == "stays below 1e-08; fp16 has its full precision above 6.1e-05"
    assert rules(dataclasses.replace(linear(1.0), result=Range(12))) == ()  # all zero


def test_bf16_holds_them() -> None:
    assert Policy.calibrated(made(linear(1.2e6)), dtype=torch.bfloat16).calls == ()


@pytest.mark.parametrize(
    ("values", "reason"),
    [(Range(4, 1e5, 1.0, batch=1), "has gradients up to 1e+05 in batch 1 at a loss scale of 8; fp16 holds 65504"),
     (Range(4, 1e-7, 1e-8, batch=1),
      "has gradients up to 1e-07 at a loss scale of 8; fp16 has its full precision above 6.1e-05")],
)  # fmt: skip
@pytest.mark.parametrize("where", ["gradient", "operand_gradients"])
def test_gradients_that_do_not_fit(where: str, values: Range, reason: str) -> None:
    given = values if where == "gradient" else (Range(), values)
    with pytest.warns(AmpWarning, match="no scale of the loss suits all gradients: at 8, those of 1 of 2 ops"):
        (rule,) = rules(linear(1.0, **{where: given}), Row("add", "add", "", "", Range(9, 1.0, 1.0)), scale=8.0)
    assert rule.reason == reason


def test_gradients_that_fit_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rules(linear(1.0, gradient=Range(4, 1.0, 1e-3), operand_gradients=(Range(4, 1.0, 1e-3),))) == ()


@pytest.mark.parametrize(("dtype", "times", "precision"), [
    (torch.float16, 1e4, "float32"), (torch.float16, 100.0, None), (torch.bfloat16, 100.0, "float32"),
    (torch.bfloat16, 10.0, None),
])  # fmt: skip
def test_a_gradient_that_is_a_sum_that_cancels(dtype: torch.dtype, times: float, precision: str | None) -> None:
    measured = Calibration((linear(1.0, gradient=Range(12, 1.0, 1e-2), cancellation=times),), dtype, batches=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no scale of the loss would help
        found = Policy.calibrated(measured).calls
    assert [rule.precision for rule in found] == ([] if precision is None else [precision])
    assert all("its gradient is a sum that cancels" in rule.reason for rule in found)


def exp(result: Range, sensitivity: float = LOW / 2, **fields: Any) -> Row:
    return Row("exp", "exp", "", "", result, sensitivity, **fields)


def test_a_harmless_op_of_the_black_list_goes_low() -> None:
    (rule,) = rules(linear(1.0), exp(Range(12, 2.7, 0.3)))
    assert rule == CallRule(
        "", "exp", "float16", None,
        "on the black list, but harmless here: stays between 0.3 and 2.7 in 3 batches", yields=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [exp(Range(12, 1e5, 0.3)), exp(Range(12, 2.7, 1e-8)), exp(Range(12, 2.7, 0.3), sensitivity=2 * LOW),
     exp(Range(12, 2.7, 0.3), sensitivity=0.0), exp(Range(3, 2.7, 0.3)),
     exp(Range(12, 2.7, 0.3), operands=(Range(12, 1.0, 1e-9),))],
    ids=["overflows", "flushed", "sensitive", "unknown", "a single number", "operands are flushed"],
)  # fmt: skip
def test_others_stay(row: Row) -> None:
    assert rules(linear(1.0), row) == ()


def test_at_a_level_that_runs_everything_low_only_fp32_rules_are_needed() -> None:
    assert rules(linear(1.0), exp(Range(12, 2.7, 0.3)), level="O3") == ()
    assert [r.op for r in rules(linear(1.0), exp(Range(12, 1e5, 0.3)), level="O3")] == ["exp"]


def test_several_calls_of_an_op_in_a_module_are_told_apart() -> None:
    rows = [dataclasses.replace(linear(largest), number=place) for place, largest in enumerate([1.0, 1e6, 1.0])]
    (rule,) = rules(*rows)
    assert (rule.number, rule.precision) == (1, "float32")


@given(st.floats(1e-30, 1e30), st.floats(1, 100), st.floats(1, 10))
def test_a_wider_margin_never_asks_for_less(largest: float, margin: float, more: float) -> None:
    assert len(rules(linear(largest), margin=margin)) <= len(rules(linear(largest), margin=margin * more))


@given(st.lists(st.tuples(st.sampled_from(["linear", "exp", "add", "softmax"]), st.floats(1e-12, 1e12)), max_size=4))
def test_survives_a_file(ops: list[tuple[str, float]]) -> None:
    rows = [Row(op, op, f"m{i}", "", Range(9, value, value, batch=1), LOW) for i, (op, value) in enumerate(ops)]
    policy = Policy.calibrated(made(*rows))
    assert Policy.from_dict(tomllib.loads(policy.to_toml())) == policy


@pytest.mark.parametrize("margin", [0.5, float("inf"), float("nan"), "2", True])
def test_a_margin_that_is_none(margin: Any) -> None:
    with pytest.raises(PolicyError, match="margin must be a number of at least 1"):
        Policy.calibrated(made(linear(1.0)), margin=margin)


def test_what_is_no_calibration() -> None:
    with pytest.raises(ArgumentError, match=r"Policy\.calibrated takes an amp_compiler\.Calibration, not dict"):
        Policy.calibrated({}, dtype=torch.float16)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ with a model


class Large(nn.Module):
    """Its second layer reaches more than fp16 holds, and the third brings it back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        with torch.no_grad():
            self.second.weight.mul_(1e6)
            self.third.weight.mul_(1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def test_a_model_that_fails_in_fp16_does_not_with_the_calibrated_policy() -> None:
    model, x = Large(), torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    assert not amp_compile(model, dtype=torch.float16)(x).isfinite().all()
    policy = Policy.calibrated(calibrate(model, [x]))
    fast = amp_compile(model, policy=policy)
    torch.testing.assert_close(fast(x), model(x), rtol=0.01, atol=0.01)
    rows = {row.node: row for row in fast.report().rows}
    assert rows["linear"].precision == "float16"
    assert rows["linear_1"].precision == rows["linear_2"].precision == "float32"
    assert "in batch 1; fp16 holds 65504" in rows["linear_1"].reason


def test_the_calibration_of_another_model() -> None:
    policy = Policy.calibrated(calibrate(Large(), [torch.randn(64, 8)]))
    with pytest.raises(PolicyError, match="names the module 'second', which the model does not have"):
        amp_compile(nn.Sequential(nn.Linear(8, 8)), policy=policy)


class Author(nn.Module):
    """Its first softmax is in fp32 because the code says so."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return torch.softmax(y.float(), -1), torch.softmax(y, -1)


def test_a_cast_in_the_models_code_comes_before_what_is_harmless(tmp_path: Path) -> None:
    model, x = Author().eval(), torch.rand(2, 4)
    policy = Policy.calibrated(calibrate(model, [x]))
    assert [(str(rule), rule.precision, rule.yields) for rule in policy.calls] == [
        (":softmax#0", "float16", True), (":softmax#1", "float16", True)
    ]  # fmt: skip
    policy.to_file(tmp_path / "policy.toml")
    compiled = amp_compile(model, policy=Policy.from_file(tmp_path / "policy.toml"))
    compiled(x)
    found = {row.node: (row.precision, row.rule) for row in compiled.report().rows if row.op == "softmax"}
    assert found == {"softmax": ("float32", "table"), "softmax_1": ("float16", "call_rule")}
    own = Policy("O2", torch.float16).with_calls([CallRule("", "softmax", "float16")])
    compiled = amp_compile(model, policy=own)
    compiled(x)
    assert {row.precision for row in compiled.report().rows if row.op == "softmax"} == {"float16"}, "a user's own rule"


class Broken(nn.Module):
    """Two graphs, and the second one has the product that does not fit fp16."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return (y * 3e5) * 1e-6


@pytest.mark.parametrize("sizes", [(2,), (2, 5, 3)])
def test_numbers_of_calls_go_on_after_a_graph_break(sizes: tuple[int, ...]) -> None:
    model = Broken()
    found = calibrate(model, [torch.ones(n, 4) for n in sizes])
    assert [(row.op, row.number, row.max_abs) for row in found.rows] == [
        ("mul", 0, 2.0), ("mul", 1, 6e5), ("mul", 2, pytest.approx(0.6))
    ]  # fmt: skip
    compiled = amp_compile(model, policy=Policy.calibrated(found, level="O3"))
    for n in (*sizes, 7):
        assert compiled(torch.ones(n, 4)).isfinite().all()
    assert [(row.precision, row.rule) for row in compiled.report().rows if row.op == "mul"][:3] == [
        ("float16", "table"), ("float32", "call_rule"), ("float32", "call_rule")
    ]  # fmt: skip
