"""Rules for single ops of a module, in a compiled model and in a conversion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from amp_compiler import (
    ArgumentError,
    CallRule,
    Policy,
    PolicyError,
    UnknownOpError,
    amp_compile,
    convert_model,
    precision,
)

FP16 = torch.float16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.fc(x)) * 3
        return torch.tanh(self.fc(y)) * y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x) + self.b(x))


def compiled_rows(model: nn.Module, policy: Policy) -> list[tuple[str, str, str]]:
    fast = amp_compile(model, policy=policy)
    fast(torch.ones(2, 4))
    return [(row.module, row.op, row.precision) for row in fast.report().rows]


def converted_rows(model: nn.Module, policy: Policy) -> list[tuple[str, str, str]]:
    report = convert_model(model.eval(), (torch.ones(2, 4),), policy=policy).report()
    return [(row.module, row.op, row.precision) for row in report.rows]


RULES = [
    (CallRule("a", "tanh", number=1), [("a", "tanh", 1)]),
    (CallRule("a", "tanh"), [("a", "tanh", 0), ("a", "tanh", 1)]),
    (CallRule("a.fc", "linear", number=1), [("a.fc", "linear", 1)]),
    (CallRule("", "tanh"), [("", "tanh", 0)]),
    (CallRule("b", "multiply", number=0), [("b", "mul", 0)]),
    (CallRule("b", "tanh", number=7), []),
]


def wide_calls(rows, rules):
    found, seen = [], {}
    for module, op, chosen in rows(Net(), Policy("O3", FP16).with_calls(rules)):
        number = seen[module, op] = seen.get((module, op), -1) + 1
        if chosen == "float32":
            found.append((module, op, number))
    return found


@pytest.mark.parametrize(("rule", "wide"), RULES)
@pytest.mark.parametrize("rows", [pytest.param(compiled_rows, marks=pytest.mark.zoo), converted_rows])
def test_a_rule_names_one_call(rows, rule, wide):
    assert wide_calls(rows, [rule]) == wide


@pytest.mark.parametrize("numbers", [(0, 2, 3, 4, 5), (1,)], ids=["one rule a module and op", "every call"])
def test_rules_of_a_compiled_model_name_their_calls(numbers):
    """As above, with all rules in one model that do not name the same call."""
    wanted = [call for i in numbers for call in RULES[i][1]]
    assert sorted(wide_calls(compiled_rows, [RULES[i][0] for i in numbers])) == sorted(wanted)


def test_a_rule_can_ask_for_low_precision_and_gives_its_reason():
    policy = Policy("O2", FP16).with_calls([CallRule("a", "tanh", "float16", 0, "measured: harmless")])
    policy = policy.with_ops(fp32=["tanh"])
    fast = amp_compile(Net(), policy=policy)
    fast(torch.ones(2, 4))
    first, *rest = [row for row in fast.report().rows if row.op == "tanh"]
    assert (first.precision, first.reason, first.rule) == ("float16", "measured: harmless", "call_rule")
    assert {row.precision for row in rest} == {"float32"}


def test_the_newest_rule_counts_and_a_number_wins():
    policy = Policy("O3", FP16).with_calls([CallRule("a", "tanh", "float16", 0), CallRule("a", "tanh", "float32")])
    assert policy.call_rule("a", "tanh", 0).precision == "float16"
    assert policy.call_rule("a", "tanh", 1).precision == "float32"
    again = policy.with_calls([CallRule("a", "tanh", "float32", 0)])
    assert again.call_rule("a", "tanh", 0).precision == "float32"
    assert len(again.calls) == 2
    assert policy.call_rule("a", "tanh", 0).precision == "float16", "a policy is never changed"
    assert policy.call_rule("b", "tanh", 0) is None


def test_a_call_rule_wins_over_the_rule_of_its_module_and_code_wins_over_both():
    class Scoped(nn.Module):
        def forward(self, x):
            with precision("bfloat16"):
                y = torch.tanh(x)
            return torch.tanh(y)

    rules = [CallRule("", "tanh", "float32")]
    policy = Policy("O3", FP16).with_modules({"*": "float16"}).with_calls(rules)
    assert [row[2] for row in compiled_rows(Scoped(), policy)] == ["bfloat16", "float32"]


def test_a_batch_norm_with_a_rule_of_its_own_is_not_folded():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).eval()
    policy = Policy("O3", FP16).with_calls([CallRule("3", "batch_norm", number=0)])
    rows = convert_model(model, (torch.ones(1, 2, 3, 3),), policy=policy).report().rows
    assert [(r.op, r.precision) for r in rows] == [
        ("conv2d", "float16"), ("conv2d", "float16"), ("batch_norm", "float32")
    ]  # fmt: skip


names = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
rules = st.builds(CallRule, names, st.sampled_from(["tanh", "linear", "softmax"]),
                  st.sampled_from(["float32", "float16"]), st.none() | st.integers(0, 99), names)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(rules, max_size=5))
def test_rules_come_back_from_a_file(tmp_path_factory, given_rules):
    path = tmp_path_factory.getbasetemp() / "calls.toml"
    policy = Policy("O3", FP16).with_calls(given_rules)
    policy.to_file(path)
    assert Policy.from_file(path) == policy


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: CallRule("a", "tanhh"), UnknownOpError, "tanh"),
    (lambda: CallRule("a", "tanh", "int8"), ArgumentError, "int8"),
    (lambda: CallRule("a", "tanh", number=-1), PolicyError, "number"),
    (lambda: CallRule("a", "tanh", number=True), PolicyError, "number"),
    (lambda: CallRule(None, "tanh"), PolicyError, "module"),
    (lambda: Policy().with_calls({"a": "float32"}), PolicyError, "list of amp_compiler.CallRule"),
    (lambda: Policy().with_calls(["a"]), PolicyError, "amp_compiler.CallRule"),
    (lambda: amp_compile(Net(), policy=Policy().with_calls([CallRule("aa", "tanh")])), PolicyError, "aa:tanh"),
    (lambda: Policy.from_dict({"call": [{"module": "a", "op": "tanh"}]}), PolicyError, "precision"),
    (lambda: Policy.from_dict({"call": [{"module": "a", "op": "tanh", "nr": 1}]}), PolicyError, "nr"),
])  # fmt: skip
def test_wrong_rules(make, error, words):
    with pytest.raises(error, match=words):
        make()
