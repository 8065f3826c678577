"""The forms that a graph is written in: text, Python, JSON, DOT, a difference."""

from __future__ import annotations

import dataclasses
import json
import shutil
import xml.etree.ElementTree as ET
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from amp_compiler import amp_compile
from amp_compiler.common.errors import ArgumentError, DrawingError
from amp_compiler.inspect.render import diff, dot, python, summary, text
from amp_compiler.inspect.render.json import graph_document, schema
from amp_compiler.inspect.render.select import find, in_module, modules
from amp_compiler.inspect.render.words import size
from amp_compiler.inspection import Inspection
from amp_compiler.ir.view import INPUTS, GraphView, NodeView, Value
from render_helpers import Small, inspect_small

# ------------------------------------------------------------------------------------------------- text


@settings(max_examples=20)
@given(width=st.integers(60, 200))
def test_the_table_fits(forward: Inspection, width: int) -> None:
    lines = text.table(forward.last, width)
    assert max(len(line.plain) for line in lines) <= max(width, 100), "100: what names, shapes and dtypes need at most"


def test_the_table_says_what_and_why(forward: Inspection) -> None:
    lines = text.plain([*text.table(forward.last, 140), *summary.ending(forward.report, 140, "forward")])
    assert "first  Linear" in lines
    assert "a matrix product" in lines
    assert "cast (1.0 kB)" in lines
    assert "level O2, bfloat16: 5 ops (" in lines
    assert "FLOPs in low precision: 100.0%" in lines


def test_forward_and_backward_are_apart(joint: Inspection) -> None:
    lines = text.plain(text.table(joint.last)).splitlines()
    assert lines.index("forward") < lines.index("backward")


@given(st.integers(0, 10**13))
def test_sizes_are_short(number: int) -> None:
    assert len(size(number)) <= 12


# ----------------------------------------------------------------------------------------------- python


@pytest.mark.parametrize(("graph", "level"), [("forward", "O2"), ("inference", "O1"), ("forward", "O0")])
def test_the_python_form_runs_and_gives_the_same(graph: str, level: str) -> None:
    found = inspect_small(graph, level)
    space: dict[str, Any] = {}
    exec(compile(python.source(found.last), "dump", "exec"), space)
    torch.manual_seed(0)
    model = Small()
    x = torch.randn(8, 16)
    state = dict(model.named_parameters())
    places = [n for n in found.last.nodes if n.op == "placeholder"]
    with torch.no_grad():
        (result,) = pytree.tree_leaves(space["forward"](*(state.get(n.label, x) for n in places)))
        wanted = amp_compile(model, level, dtype=torch.bfloat16, backend="eager")(x)
    torch.testing.assert_close(result, wanted, rtol=0, atol=0)


def test_the_python_form_of_a_joint_graph_is_python(joint: Inspection) -> None:
    code = python.source(joint.last)
    compile(code, "dump", "exec")
    assert code.index("# ---- forward") < code.index("# ---- backward")


# ------------------------------------------------------------------------------------------------- json


def check(document: Any) -> None:
    jsonschema.validate(document, schema())


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_graphs_fit_the_schema(forward: Inspection, joint: Inspection, encoder: Inspection) -> None:
    for found in (forward, joint, encoder):
        document = graph_document(found.report, found.last, found.stages, target="x", graph=found.graph)
        check(json.loads(json.dumps(document)))
        assert [n["name"] for n in document["nodes"]] == [n.name for n in found.last.nodes]
        assert document["casts"] == sum(n["kind"] == "cast" for n in document["nodes"])


def test_reports_fit_the_schema() -> None:
    model = Small()
    fast = amp_compile(model, dtype=torch.bfloat16, backend="eager")
    check(json.loads(fast.report().to_json()))  # nothing captured yet
    fast(torch.randn(8, 16)).sum().backward()
    document = json.loads(fast.report().to_json())
    check(document)
    assert len(document["rows"]) == len(fast.report().rows)


def test_a_document_with_a_strange_field_does_not_fit(forward: Inspection) -> None:
    document = graph_document(forward.report, forward.last, forward.stages, target="x", graph="forward")
    without = {k: v for k, v in document.items() if k != "rows"}
    for wrong in ({**document, "colour": 1}, {**document, "schema": 2}, without):
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


# -------------------------------------------------------------------------------------------------- dot


def test_dot_has_every_op_and_module(joint: Inspection) -> None:
    written = dot.dot(joint.last, 'a "title"')
    assert 'label="a \\"title\\""' in written
    assert written.count("{") == written.count("}")
    for node in joint.last.nodes:
        assert (f'"{node.name}" [' in written) == (node.kind not in ("parameter", "buffer", "constant"))
    assert 'subgraph "cluster_first"' in written
    assert 'subgraph "cluster_backward.first"' in written


def test_svg_says_what_is_missing(forward: Inspection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DrawingError, match=r"install it .*or use --format html"):
        dot.svg(forward.last)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_svg_is_a_picture(forward: Inspection) -> None:
    strange = GraphView((NodeView('a"\\', "call", "add", reason="\\"), NodeView("b", "call", "</g>", inputs=('a"\\',))))
    assert 'a"\\' in "".join(ET.fromstring(dot.svg(strange, "\\")).itertext())
    root = ET.fromstring(dot.svg(forward.last, "small"))
    assert root.tag.endswith("svg")
    words = "".join(root.itertext())
    assert "layer_norm" in words


# ------------------------------------------------------------------------------------------- difference


def test_before_against_after(forward: Inspection) -> None:
    found = diff.difference(forward.stages[0].view, forward.last, "captured", "O2")
    assert {new.name: (old.precision, new.precision) for old, new in found.changed} == {
        name: ("float32", "bfloat16") for name in ("linear", "relu", "layer_norm", "linear_1", "softmax")
    }
    assert ("first.weight", "bfloat16", 16 * 32 * 2, "forward") in found.casts_came
    assert found.casts_went == ()
    check(diff.document(found))
    lines = text.plain(diff.table(found))
    assert "5 ops with another precision" in lines
    assert "+ first.weight → bf16  1.0 kB" in lines


def test_two_levels() -> None:
    o1, o3 = inspect_small(level="O1"), inspect_small(level="O3")
    there = diff.difference(o1.last, o3.last, "O1", "O3")
    back = diff.difference(o3.last, o1.last, "O3", "O1")
    assert {new.name for _, new in there.changed} == {new.name for _, new in back.changed} == {"layer_norm", "softmax"}
    assert there.casts_came == back.casts_went
    same = diff.difference(o1.last, o1.last, "O1", "O1")
    assert (same.changed, same.came, same.went, same.casts_came, same.casts_went) == ((), (), (), (), ())


# ------------------------------------------------------------------------------------------------ parts


def test_a_part_of_a_graph(encoder: Inspection) -> None:
    view = encoder.forward
    assert "layers.0" in modules(view)
    part = in_module(view, "layers.0.*")
    assert part.nodes
    assert all(n.module.startswith("layers.0") or n.kind in INPUTS for n in part.nodes)
    assert all(i in part.by_name for n in part.nodes for i in n.inputs)
    with pytest.raises(ArgumentError, match="Did you mean 'layers"):
        in_module(view, "layer.0")


def test_a_node_by_name_or_path(forward: Inspection) -> None:
    assert find(forward.last, "linear").op == "linear"
    assert find(forward.last, "first.weight").kind == "parameter"
    with pytest.raises(ArgumentError, match="Did you mean 'softmax'"):
        find(forward.last, "softmx")


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@settings(max_examples=30)  # each is written four times
@given(st.lists(names, min_size=1, max_size=6, unique=True), st.data())
def test_any_graph_can_be_written(labels: list[str], data: st.DataObject) -> None:
    """Whatever names, reasons and edges a graph has, every form takes it."""
    nodes = []
    for place, label in enumerate(labels):
        inputs = data.draw(st.lists(st.sampled_from(labels[:place]), unique=True, max_size=2)) if place else []
        kind = data.draw(st.sampled_from(["input", "parameter", "call", "cast"] if inputs else ["input", "call"]))
        value = Value("bfloat16", (data.draw(st.integers(0, 9)), "s0"))
        nodes.append(NodeView(label, kind, "add", (value,), "bfloat16", label, module=label, inputs=tuple(inputs)))
    view = GraphView(tuple(nodes))
    text.table(view)
    dot.dot(view, labels[0])
    diff.table(diff.difference(view, GraphView(), "a", "b"))
    again = dataclasses.replace(view)
    assert diff.difference(view, again, "a", "b").changed == ()
