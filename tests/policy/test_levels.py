"""Levels are rows: what each makes of an op class, and a new one that is a row and nothing else."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import Policy, amp_compile, convert_model
from amp_compiler.cli.app import app
from amp_compiler.common.errors import ArgumentError
from amp_compiler.inspect.render.explain import explain
from amp_compiler.policy import LEVELS, Level, Treatment, check_level
from amp_compiler.policy.ops.row import OpClass
from helpers import BF16

CLASSES = (OpClass.LOW, OpClass.FP32, OpClass.FOLLOW)


class Small(nn.Module):
    """One op of each class: a product, a softmax, an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(self.fc(x), -1) + y * 2


def precisions(level: str) -> dict[str, str]:
    fast = amp_compile(Small(), level=level, dtype=BF16, backend="eager")
    fast(torch.randn(3, 4), torch.randn(3, 4))
    return {row.op: row.precision for row in fast.report().rows}


def test_what_each_level_makes_of_each_class() -> None:
    low, fp32 = "bfloat16", "float32"
    assert precisions("O0") == {"linear": fp32, "softmax": fp32, "mul": fp32, "add": fp32}
    assert precisions("O1") == {"linear": low, "softmax": fp32, "mul": fp32, "add": fp32}
    assert precisions("auto") == {"linear": low, "softmax": fp32, "mul": fp32, "add": fp32}
    assert precisions("O2") == {"linear": low, "softmax": low, "mul": low, "add": low}, "softmax is fp32 inside"
    assert precisions("O3") == {"linear": low, "softmax": low, "mul": low, "add": low}


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("cls", CLASSES)
def test_a_level_has_words_for_every_class(name: str, cls: OpClass) -> None:
    assert LEVELS[name].says(cls).startswith(f"level {name} ")


@given(st.sampled_from(list(LEVELS)), st.sampled_from(list(OpClass)))
def test_a_level_that_touches_nothing_asks_for_nothing(name: str, cls: OpClass) -> None:
    level = LEVELS[name]
    assert level.rewrites == any(level.treatment(c) is not Treatment.UNTOUCHED for c in OpClass)
    if level.treatment(cls).asks_for_low:
        assert level.rewrites
    assert level.treatment(cls) is Treatment.UNTOUCHED or cls in CLASSES, "ops that move values follow at every level"


@pytest.mark.parametrize("given", [None, 2, [], "o2", "O4", "Auto"])
def test_what_is_no_level_is_an_error(given: object) -> None:
    with pytest.raises(ArgumentError, match="Unknown level"):
        check_level(given)


# ---------------------------------------------------------------- a level of one's own, as CONTRIBUTING describes it


@pytest.fixture
def products_and_norms(monkeypatch: pytest.MonkeyPatch) -> str:
    """A level between O1 and auto: norms and softmax may be low outside, all other arithmetic is fp32."""
    row = Level("norms", low=Treatment.LOW, fp32=Treatment.FP32_LOW_OUTSIDE, follow=Treatment.FP32)
    monkeypatch.setitem(LEVELS, row.name, row)
    return row.name


def test_a_new_level_is_one_row(products_and_norms: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert precisions("norms") == {"linear": "bfloat16", "softmax": "bfloat16", "mul": "float32", "add": "float32"}
    converted = convert_model(Small(), (torch.randn(3, 4), torch.randn(3, 4)), level="norms", dtype=BF16)
    assert {row.op: row.precision for row in converted.report().rows}["softmax"] == "bfloat16"
    path = tmp_path / "policy.toml"
    Policy("norms", BF16).to_file(path)
    assert Policy.from_file(path).level == "norms"
    with pytest.raises(ArgumentError, match="Did you mean 'norms'"):
        Policy("nroms")


def test_a_new_level_is_explained(products_and_norms: str) -> None:
    fast = amp_compile(Small(), level="norms", dtype=BF16, backend="eager")
    fast(torch.randn(3, 4), torch.randn(3, 4))
    view = next(s.view for s in reversed(fast.history) if s.graph == "forward")
    told = explain(next(n for n in view.nodes if n.op == "mul"), view, "norms")
    assert told.chain[0].by == "the op table has mul as FOLLOW; level norms keeps other arithmetic in fp32"


def test_the_command_line_takes_a_new_level(products_and_norms: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from typer.testing import CliRunner

    (tmp_path / "small.py").write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))\n"
    )
    result = CliRunner().invoke(
        app, ["dump", f"{tmp_path}/small.py:model", "--input", "2x4", "--level", "norms", "--format", "json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["level"] == "norms"


@settings(max_examples=25, deadline=None)
@given(
    low=st.sampled_from([Treatment.LOW, Treatment.FP32, Treatment.LOWEST_INPUT]),
    fp32=st.sampled_from([Treatment.FP32, Treatment.FP32_LOW_OUTSIDE, Treatment.LOW]),
    follow=st.sampled_from([Treatment.FP32, Treatment.LOWEST_INPUT, Treatment.LOW_UNLESS_WIDE, Treatment.LOW]),
)
def test_any_row_is_a_level_that_runs(low: Treatment, fp32: Treatment, follow: Treatment) -> None:
    """Whatever a row says, the graph passes the verifier (AMP_VERIFY=deep) and gives nearly what fp32 gives."""
    level = Level("any", low=low, fp32=fp32, follow=follow)
    LEVELS["any"] = level
    try:
        model, args = Small(), (torch.randn(3, 4), torch.randn(3, 4))
        torch.testing.assert_close(
            amp_compile(model, level="any", dtype=BF16, backend="eager")(*args), model(*args), atol=0.05, rtol=0.05
        )
        found = precisions("any")
    finally:
        del LEVELS["any"]
    expected = {"linear": low, "mul": follow}
    for op, treatment in expected.items():
        assert found[op] == ("bfloat16" if treatment.asks_for_low else "float32"), (op, treatment)


@pytest.mark.parametrize("place", ["README.md", "docs/guide.md", "docs/design.md"])
def test_the_tables_of_levels_have_every_level(place: str) -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / place).read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    missing = [name for name in LEVELS if not any(f"`{name}`" in row for row in rows)]
    assert missing == [], f"document the level in {place}"


def test_help_and_docstring_name_every_level() -> None:
    from amp_compiler.cli.common import Level as Option

    told = next(item.help for item in Option.__metadata__ if getattr(item, "help", None))
    assert [name for name in LEVELS if name not in told] == [], "name the level in the help text of --level"
    text = amp_compile.__doc__ or ""
    assert [name for name in LEVELS if name not in text] == [], "name the level in the docstring of amp_compile"


def test_nothing_but_the_rows_names_levels() -> None:
    """No product code compares a level's name: it asks the row."""
    import ast
    from pathlib import Path

    root = Path(__file__).parents[2]
    files = [p for folder in ("amp_compiler", "passes", "kernels") for p in (root / folder).rglob("*.py")]
    names, found = set(LEVELS) - {"auto"}, []  # "auto" names a back end and a front end too
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                parts = [c for part in (node.left, *node.comparators) for c in ast.walk(part)]
                if any(isinstance(c, ast.Constant) and c.value in names for c in parts):
                    found.append(f"{path.relative_to(root)}:{node.lineno}")
    assert found == []

