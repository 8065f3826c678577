"""Rules are data: each has words for users, and a decision holds its rule and the nodes that it came from."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import Policy, amp_compile, convert_model
from amp_compiler.inspect.render.explain import Explanation, explain
from amp_compiler.inspect.report import Report
from amp_compiler.passes import precision
from amp_compiler.passes.precision.walk import RULES
from amp_compiler.policy import Rule, words_for
from helpers import BF16

X = torch.randn(4, 4)


def chain(fn: Any, op: str, level: str = "O2", *args: Tensor) -> Explanation:
    class Model(nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return fn(*given)

    fast = amp_compile(Model(), level=level, dtype=BF16, backend="eager")
    fast(*(args or (X, X)))
    view = next(s.view for s in reversed(fast.history) if s.graph == "forward")
    return explain(next(n for n in view.nodes if n.op == op), view, level)


def names(found: Explanation) -> list[str]:
    return [link.node.op for link in found.chain]


@pytest.mark.parametrize("rule", Rule)
def test_every_rule_has_words(rule: Rule) -> None:
    assert rule.words
    assert "_" not in rule.words.replace("set_precision", "").replace("insert_casts", ""), "words, no identifiers"
    assert words_for(rule.value) == rule.words
    assert json.loads(json.dumps({"rule": rule})) == {"rule": rule.value}
    assert f"{rule}" == rule.value


def test_a_rule_of_a_newer_release_stands_for_itself() -> None:
    assert words_for("of_tomorrow") == "of_tomorrow"


def test_the_order_of_the_rules_is_what_the_docstring_shows() -> None:
    shown = re.findall(r"^ ?\d+\. ``(\w+)``", precision.__doc__ or "", re.MULTILINE)
    assert shown == [rule.__name__ for rule in RULES]
    numbers = [int(n) for n in re.findall(r"^ ?(\d+)\. ``", precision.__doc__ or "", re.MULTILINE)]
    assert numbers == list(range(1, len(RULES) + 1))


def test_a_chain_leads_from_a_wide_value_to_the_op_that_made_it() -> None:
    found = chain(lambda x, y: ((x @ y).exp() * 2).transpose(0, 1) + 1, "add")
    assert names(found)[:4] == ["add", "transpose", "mul", "exp"]
    assert "black list" in found.chain[3].by


def test_a_chain_leads_through_ops_that_follow_their_input() -> None:
    found = chain(lambda x, y: (x @ y).reshape(-1).view(4, 4), "view")
    assert names(found) == ["view", "reshape", "matmul"]


def test_a_chain_leads_to_the_input_that_keeps_an_op_in_fp32() -> None:
    found = chain(lambda x, y: x @ y + x, "add", "auto")
    assert [link.node.title for link in found.chain] == ["add", "x"] or found.chain[1].node.kind == "input"


def test_a_chain_leads_to_the_cast_that_the_author_wrote() -> None:
    found = chain(lambda x, y: (x @ y).float() * 3 + y.to(x.dtype), "mul")
    assert found.chain[0].node.rule == Rule.ASKED
    assert len(found.chain) > 1


def test_a_chain_leads_to_what_carries_a_constant() -> None:
    found = chain(lambda x, y: (x @ y).masked_fill(y > 0, -3.4e38) + (x @ y), "masked_fill")
    assert found.chain[0].node.rule == Rule.CONSTANT
    assert "-3.4e+38" in found.chain[0].reason


def test_causes_survive_a_file(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten())
    report = convert_model(model, (X,), dtype=BF16).report()
    assert any(row.causes for row in report.rows)
    again = Report.from_json(report.to_json())
    assert [row.causes for row in again.rows] == [row.causes for row in report.rows]


def test_a_report_of_an_older_release_has_no_causes() -> None:
    report = convert_model(nn.Linear(4, 4), (X,), dtype=BF16).report()
    data = json.loads(report.to_json())
    for row in data["rows"]:
        del row["causes"], row["limit"]
    assert [row.causes for row in Report.from_json(data).rows] == [()] * len(report.rows)


def test_causes_are_nodes_of_the_graph() -> None:
    for level in ("O1", "auto", "O2", "O3", "torch"):
        policy = Policy.torch("cpu", BF16) if level == "torch" else Policy(level, BF16)
        model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        fast = amp_compile(model, policy.level, policy=policy, backend="eager")
        fast(torch.randn(2, 3, 8))
        seen = {node.name for stage in fast.history if stage.graph == "forward" for node in stage.view.nodes}
        assert {cause for row in fast.report().rows for cause in row.causes} <= seen
