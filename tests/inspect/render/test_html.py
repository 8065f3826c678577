"""The page: what is in it, and what it does in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_compiler import amp_compile
from amp_compiler.inspect.render import html
from amp_compiler.inspect.report import Report
from amp_compiler.inspection import Inspection
from amp_compiler.ir.view import GraphView, NodeView
from amp_compiler.rewrite.records import Record
from chromium import Chromium, find_chromium
from render_helpers import Small

needs_browser = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium on PATH")


def page_of(found: Inspection) -> str:
    return html.page(found.stages, found.report, title=found.target, graph=found.graph)


def data_of(page: str) -> Any:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found)


# ------------------------------------------------------------------------------------------- in the file


def test_the_page_needs_nothing_else(encoder: Inspection) -> None:
    page = page_of(encoder)
    assert not re.findall(r'(?:src|href)\s*=\s*"', page)
    assert "{{" not in page
    assert "Permission is hereby granted" in page, "dagre's licence goes with its code"


def test_every_stage_is_there_whole(encoder: Inspection) -> None:
    data = data_of(page_of(encoder))
    text = data["strings"]
    assert [s["name"] for s in data["stages"]] == [s.name for s in encoder.stages]
    for packed, stage in zip(data["stages"], encoder.stages, strict=True):
        names = [text[data["nodes"][i][0][0]] for i in packed["nodes"]]
        reasons = [text[data["nodes"][i][0][5]] for i in packed["nodes"]]
        assert names == [n.name for n in stage.view.nodes]
        assert reasons == [n.reason for n in stage.view.nodes]
    assert len(data["nodes"]) < sum(len(s.view.nodes) for s in encoder.stages), "a node is written once"


@settings(max_examples=40)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_no_text_breaks_out_of_its_place(text: str) -> None:
    """A reason, a path or a title may hold anything, a script's end included."""
    for given_text in (text, f"</script>{text}<!--", "{{page}}" + text):
        view = GraphView((NodeView("x", "call", "add", precision="float32", reason=given_text, module=given_text),))
        record = Record("capture", 0.0, True, "", view=view)
        page = html.page([record], Report(notes=(given_text,)), title=given_text, graph="forward")
        data = data_of(page)
        assert data["notes"] == [given_text]
        assert data["title"] == given_text
        assert page.count("</script>") == 4


def test_reports_in_python(tmp_path: Path) -> None:
    fast = amp_compile(Small(), dtype=torch.bfloat16, backend="eager")
    assert data_of(fast.report().to_html())["stages"][0]["name"] == "nothing captured"
    fast(torch.randn(8, 16)).sum().backward()
    report = fast.report()
    page = report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page
    stages = data_of(page)["stages"]
    assert [s["name"] for s in stages][:2] == ["capture", "normalize"]
    assert stages[-1]["graph"] == "joint"
    table = report._repr_html_()
    assert table.count("<tr>") == len(report.rows) + 1
    assert "a matrix product" in table
    assert "<pre" in table, "the summary comes first"


# ---------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as made:
        yield made


def open_page(browser: Chromium, found: Inspection, folder: Path) -> None:
    path = folder / "graph.html"
    path.write_text(page_of(found), encoding="utf-8")
    browser.errors.clear()
    browser.requests.clear()
    browser.open(path)


@needs_browser
def test_a_person_looks_at_an_encoder(browser: Chromium, encoder: Inspection, tmp_path: Path) -> None:
    open_page(browser, encoder, tmp_path)
    shown = "document.querySelectorAll('[data-key]').length"
    assert "casts" in browser.text("#totals")
    assert "bf16" in browser.text("#legend")

    browser.click("#close")
    closed = browser.run(shown)
    browser.click('[data-key="m:layers"]')
    browser.click('[data-key="m:layers.0"]')
    assert browser.run(shown) > closed, "a click opens a module"
    assert "layers.0" in browser.text("#panel")

    browser.click("#search")
    browser.type("layers.1 layer_norm")
    assert "layer_norm" in browser.text("#hits")
    browser.key("Enter")
    assert "fp32 inside torch's kernel" in browser.text("#reason")
    chosen = browser.run("document.querySelector('.chosen').getBoundingClientRect().x")
    assert 0 < chosen < 1440, "what was searched for is in sight"

    browser.run("document.activeElement.blur()")
    casts = browser.text("#totals")
    browser.click("#back")
    browser.run("{ const s = document.getElementById('slider'); s.value = 4; s.dispatchEvent(new Event('input')); }")
    assert browser.text("#stages .now") == "insert_casts"
    assert browser.text("#totals") != casts, "the slider changes the picture"
    assert "casts and 0 nodes added" in browser.text("#told")
    browser.click("#open")
    assert browser.run("document.querySelectorAll('.op.new').length") > 20, "what a pass added is marked"
    browser.key("ArrowLeft")
    assert browser.text("#stages .now") == "assign_precision"
    assert "ops changed precision" in browser.text("#told")

    browser.run("document.getElementById('fit').click()")
    browser.click('[data-key^="n:linear"]')
    assert browser.text("#reason")
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "about:"))] == []


@needs_browser
def test_forward_and_backward_side_by_side(browser: Chromium, joint: Inspection, tmp_path: Path) -> None:
    open_page(browser, joint, tmp_path)
    assert browser.run("[...document.querySelectorAll('.pane h2')].map(e => e.innerText)") == ["forward", "backward"]
    browser.click("#open")
    browser.click('[data-part="forward"] [data-key^="n:relu"]')
    assert browser.run("document.querySelectorAll('[data-part=\"backward\"] .twin').length") >= 1
    assert "ITS BACKWARD" in browser.text("#panel").upper()
    assert browser.errors == []


@needs_browser
def test_two_thousand_nodes_stay_usable(browser: Chromium, tmp_path: Path) -> None:
    """Closed at first: few things are drawn. Opened whole, all of them are."""
    nodes = [NodeView("x", "input", "placeholder")]
    for number in range(2000):
        module = f"layers.{number // 40}.part{number // 8 % 5}"
        source = nodes[-1].name if number % 3 else nodes[max(len(nodes) - 5, 0)].name
        nodes.append(NodeView(f"n{number}", "call", "add", (), "bfloat16", "why", module=module, inputs=(source,)))
    record = Record("capture", 0.0, True, "", view=GraphView(tuple(nodes)))
    path = tmp_path / "large.html"
    path.write_text(html.page([record], Report(), title="large", graph="forward"), encoding="utf-8")
    browser.errors.clear()
    browser.open(path)
    assert browser.run("document.querySelectorAll('[data-key]').length") < 100
    browser.click("#open")
    assert browser.run("document.querySelectorAll('.op').length") == 2001
    assert browser.errors == []
