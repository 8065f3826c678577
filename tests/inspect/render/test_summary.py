"""``print(report)``: what a person reads first, on a screen; ``report.full()`` has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import amp_compile, compile_train_step
from amp_compiler.common.errors import ArgumentError
from amp_compiler.inspect.data import Row
from amp_compiler.inspect.render.modules import LINES, summarize
from amp_compiler.inspect.render.summary import lines
from amp_compiler.inspect.report import Report

REASONS = {
    "linear": "a matrix product: fast on low-precision units",
    "softmax": "divides exponentials by their sum: fp16 overflows above 65504",
    "sum": "sums many values: fp16 overflows above 65504",
}


def row(
    node: str, op: str, module: str, precision: str = "bfloat16", rule: str = "table", reason: str = "", **more: Any
) -> Row:
    flops = 100 if op == "linear" else 0
    return Row(node, op, module, "", precision, reason or REASONS.get(op, "a reason"), rule, 0, flops, **more)


def bert_like(layers: int = 12) -> Report:
    """Rows as a BERT has them: hundreds, most of them alike."""
    follows = {"reason": "follows its input: copies values", "causes": ("weight",)}
    rows = [row("embedding", "embedding", "bert.embeddings", "float32", **follows)]
    for i in range(layers):
        path = f"bert.encoder.layer.{i}"
        rows += [row(f"{name}_{i}", "linear", f"{path}.attention.self.{name}") for name in ("query", "key", "value")]
        rows.append(row(f"softmax_{i}", "softmax", f"{path}.attention.self", "float32"))
        rows += [row(f"{name}_{i}", "linear", f"{path}.{name}.dense") for name in ("intermediate", "output")]
    rows.append(row("sum", "sum", "", "float32"))
    counts = {"bfloat16": 5 * layers, "float32": layers + 2}
    casts = {f"bert.encoder.layer.{i}.attention.self": 2 for i in range(layers)} | {"": 1}
    return Report(tuple(rows), "O2", "bfloat16", 2 * layers + 1, 4096, 1.0, counts, casts_by_module=casts)


def test_a_large_model_fits_a_screen() -> None:
    report = bert_like()
    text = str(report)
    assert len(text.splitlines()) < 30 < len(report.rows)
    assert max(map(len, text.splitlines())) <= 100, "of what does not go to a terminal"
    assert text.splitlines()[0] == "level O2, bfloat16: 74 ops (60 bfloat16, 14 float32)"
    assert "FLOPs in low precision: 100.0%" in text


def test_layers_that_are_alike_share_a_line() -> None:
    text = str(bert_like())
    assert "bert.encoder.layer.0-11.attention.self" in text
    assert "layer.0." not in text
    assert "layer.11" not in text


def test_a_layer_that_differs_has_a_line_of_its_own() -> None:
    report = bert_like()
    other = tuple(r if r.node != "softmax_5" else row("softmax_5", "softmax", r.module, rule="white_list")
                  for r in report.rows)  # fmt: skip
    names = " ".join(m.name for m in summarize(Report(other, "O2", "bfloat16")))
    for part in ("layer.0-4", "layer.5", "layer.6-11"):
        assert part in names


def test_the_lines_add_up_to_the_whole() -> None:
    report = bert_like()
    for limit in (1, 4, LINES, 100):
        found = summarize(report, limit)
        assert sum((m.ops for m in found), start=type(found[0].ops)()) == report.by_precision
        assert sum(m.casts for m in found) == report.casts
        assert sum(m.flops for m in found) == sum(r.flops for r in report.rows)
    assert len(summarize(report)) <= LINES


def test_what_is_in_fp32_and_why() -> None:
    text = str(bert_like())
    assert "12 × softmax in bert.encoder.layer.0-11.attention.self" in text
    assert "divides exponentials by their sum: fp16 overflows above 65504" in text
    assert "1 × sum in (model)" in text
    assert text.index("12 × softmax") < text.index("1 × sum") < text.index("1 × embedding"), "what follows comes last"


def test_at_o0_fp32_is_nothing_unusual() -> None:
    report = Report((row("linear", "linear", "a", "float32", "level", "level O0: untouched"),), "O0", "bfloat16")
    assert "in float32" not in str(report)


def test_the_unusual_is_all_there() -> None:
    limit = "-3.40282e+38 was the limit of its dtype and is now -65504"
    report = Report(
        (row("masked_fill", "masked_fill", "a", reason=f"a reason; {limit}", limit=limit),
         row("add", "add", "a", "float32", "constant",
         "the constant 1e-08 is not representable in float16: kept in fp32")),
        "O2", "float16", not_captured=("graph break: " + "long " * 40,), notes=("a note",),
    )  # fmt: skip
    text = str(report)
    assert "-3.40282e+38 was the limit of its dtype and is now -65504" in text
    assert "the constant 1e-08 is not representable in float16" in text
    assert "not captured: graph break: long" in text
    assert "note: a note" in text
    assert max(map(len, text.splitlines())) <= 100


def test_many_reasons_are_cut_and_say_where_the_rest_is() -> None:
    rows = tuple(row(f"n{i}", "add", "a", "float32", "constant", f"the constant {i}e9 is too large") for i in range(40))
    text = str(Report(rows, "O2", "float16"))
    assert len(text.splitlines()) < 50
    assert "28 more reasons: report.full()" in text


def test_every_row_on_request() -> None:
    report = bert_like()
    text = report.full()
    for one in report.rows:
        assert one.node in text
    assert max(map(len, text.splitlines())) <= 100
    assert "bert.encoder.layer.7.attention.self.key" in text.splitlines()
    words = " ".join(text.split())
    assert words.count(REASONS["softmax"]) == 12, "whole reasons, wrapped and not cut"


@settings(max_examples=25)
@given(st.integers(60, 200))
def test_both_fit_any_terminal(width: int) -> None:
    report = bert_like(3)
    assert max(len(line.plain) for line in lines(report, width)) <= width
    assert max(map(len, report.full(width).splitlines())) <= width


def test_the_terminal_says_how_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert 60 < max(map(len, str(bert_like()).splitlines())) <= 72


paths = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "layer1", "layer2", ""]), max_size=4).map(
    lambda parts: ".".join(p for p in parts if p)
)


@settings(max_examples=50)
@given(st.lists(st.tuples(paths, st.sampled_from(["linear", "sum"]), st.sampled_from(["bfloat16", "float32"]))))
def test_any_rows_add_up(given_rows: list[tuple[str, str, str]]) -> None:
    rows = tuple(row(f"n{i}", op, path, precision) for i, (path, op, precision) in enumerate(given_rows))
    report = Report(rows, "O2", "bfloat16")
    found = summarize(report)
    assert sum(sum(m.ops.values()) for m in found) == len(rows)
    assert str(report)
    assert report.full()


# ------------------------------------------------------------------------------------------- a real model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.exp().sum()


@pytest.fixture(scope="module")
def trained() -> Report:
    fast = amp_compile(Net(), dtype=torch.bfloat16, backend="eager")
    fast(torch.ones(2, 8)).backward()
    report: Report = fast.report()
    return report


def test_the_casts_of_a_real_model_belong_to_its_modules(trained: Report) -> None:
    assert trained.casts_by_module is not None
    assert sum(trained.casts_by_module.values()) == trained.casts
    assert trained.casts_by_module["layers.0.0"] > 0
    assert "layers.0-3" in str(trained)
    again = Report.from_json(trained.to_json())
    assert str(again) == str(trained)


def test_a_training_step_reports_the_same_way() -> None:
    model = Net()
    step = compile_train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1), dtype=torch.bfloat16,
                              backend="eager")  # fmt: skip
    step(torch.ones(2, 8))
    report = step.report()
    assert report.casts_by_module is not None
    assert "layers.0-3" in str(report)


def test_why_suggests(trained: Report) -> None:
    assert {r.module for r in trained.why("layers.2")} == {"layers.2.0", "layers.2.1"}
    with pytest.raises(ArgumentError, match="Did you mean 'linear'"):
        trained.why("linaer")
    with pytest.raises(ArgumentError, match="Its ops are exp, gelu, linear, sum"):
        trained.why("zzz")
    with pytest.raises(ArgumentError, match="call the model first"):
        Report().why("linear")


def test_a_folder_that_is_not_there(trained: Report, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no folder .*missing.*mkdir -p"):
        trained.to_html(tmp_path / "missing" / "graph.html")
    with pytest.raises(ArgumentError, match="it is a folder"):
        trained.to_html(tmp_path)
    assert trained.to_html(tmp_path / "graph.html") == (tmp_path / "graph.html").read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["graph.html"]
