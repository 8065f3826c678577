"""Records of stages: their texts and views are made when they are read, and are those of the stage."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, fx

from amp_compiler import ir
from amp_compiler.ir.view import GraphView, take_view
from amp_compiler.rewrite.records import Record, record
from helpers import pre_dispatch

aten = torch.ops.aten


def captured() -> fx.GraphModule:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu() + 1

    return pre_dispatch(fn, torch.randn(3, 4), torch.randn(4, 5))


def change(gm: fx.GraphModule) -> None:
    """Change what a record shows: an op, a value, a name, a reason's place in the graph."""
    node = next(n for n in gm.graph.nodes if n.target is aten.relu.default)
    node.target = aten.sigmoid.default
    node.meta["val"] = ir.retype(node.meta["val"], torch.bfloat16)
    node.meta["stack_trace"] = ""
    node._rename("other")
    last = next(iter(reversed(gm.graph.nodes)))
    last.args = (node,)
    gm.graph.eliminate_dead_code()


@pytest.mark.parametrize("graph", ["forward", "convert"])
def test_a_record_shows_the_graph_as_it_was(graph: str) -> None:
    gm = captured()
    text, view = ir.format_graph(gm), take_view(gm)
    made = record("capture", 0.1, True, gm, graph, [])
    change(gm)
    assert ir.format_graph(gm) != text
    assert (made.text, made.view) == (text, view)
    assert made.text is made.text
    assert made.view is made.view


def test_a_pass_that_changes_nothing_has_the_record_before_it() -> None:
    gm = captured()
    first = record("capture", 0.1, True, gm, "forward", [])
    second = record("normalize", 0.2, False, gm, "forward", [first])
    change(gm)
    third = record("insert_casts", 0.3, True, gm, "forward", [first, second])
    assert second.text is first.text
    assert second.view is first.view
    assert (second.name, second.seconds, second.modified) == ("normalize", 0.2, False)
    assert third.text == ir.format_graph(gm) != first.text


def test_an_unchanged_graph_of_another_module_has_a_record_of_its_own() -> None:
    first = record("capture", 0.1, True, captured(), "forward", [])
    other = captured()
    change(other)
    second = record("normalize", 0.2, False, other, "forward", [first])
    assert second.text == ir.format_graph(other) != first.text


def test_a_functional_graph_knows_the_forward_graph_of_its_time() -> None:
    forward, joint = captured(), captured()
    first = record("capture", 0.1, True, forward, "forward", [])
    expected = take_view(joint, take_view(forward))
    second = record("fold_casts", 0.1, True, joint, "joint", [first])
    change(forward)
    assert second.view == expected


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_of_an_unread_record_show_the_same(again: object) -> None:
    assert callable(again)
    gm = captured()
    made, text, view = record("capture", 0.1, True, gm, "forward", []), ir.format_graph(gm), take_view(gm)
    found = again(made)
    change(gm)
    assert isinstance(found, Record)
    assert (found.text, found.view, found) == (text, view, made)


def test_a_record_keeps_no_module_alive() -> None:
    gm = captured()
    made, dead = record("capture", 0.1, True, gm, "forward", []), weakref.ref(gm)
    del gm
    gc.collect()
    assert dead() is None
    assert "relu" in made.text


def test_a_record_without_a_graph() -> None:
    made = Record("nothing captured", 0.0, False, "")
    assert (made.text, made.view) == ("", GraphView())
    with pytest.raises(AttributeError, match="no attribute 'texts'"):
        made.texts  # noqa: B018
