"""Errors: one class per cause, all of them public, with fields that a program can read."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import Tensor, nn

import amp_compiler
from amp_compiler import (
    AmpError,
    ArgumentError,
    BannedOpError,
    CaptureError,
    Policy,
    PolicyError,
    UnknownOpError,
    amp_compile,
    convert_model,
)
from amp_compiler.common import errors

FIELDS = ("pass_name", "node", "source", "hint")
CLASSES = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, (AmpError, Warning))]


def raised() -> AmpError:
    return BannedOpError("no", pass_name="assign_precision", node="bce", source="m.py:3 in forward: f(x)", hint="do")


def test_every_class_is_public() -> None:
    assert len(CLASSES) > 10
    for cls in CLASSES:
        assert cls.__name__ in amp_compiler.__all__
        assert getattr(amp_compiler, cls.__name__) is cls
        assert cls.__name__ in dir(amp_compiler)


def test_every_public_name_is_there() -> None:
    for name in amp_compiler.__all__:
        assert getattr(amp_compiler, name) is not None


@pytest.mark.parametrize("cls", [c for c in CLASSES if issubclass(c, AmpError)], ids=lambda c: c.__name__)
def test_fields_are_empty_where_nothing_is_known(cls: type[AmpError]) -> None:
    error = cls("What is wrong.")
    assert str(error) == "What is wrong."
    assert [getattr(error, name) for name in FIELDS] == ["", "", "", ""]


def test_the_hint_is_the_end_of_the_text_unless_it_is_in_it_already() -> None:
    assert str(AmpError("Wrong.", hint="Mend it.")) == "Wrong. Mend it."
    assert str(AmpError("Wrong: mend it. At m.py:3.", hint="mend it.")) == "Wrong: mend it. At m.py:3."


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_fields_survive_copies_and_pickles(again) -> None:
    error, twin = raised(), again(raised())
    assert type(twin) is BannedOpError
    assert str(twin) == str(error) == "no do"
    assert vars(twin) == vars(error)


# ------------------------------------------------------------------------------------------ where they are known


class Banned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid())


def test_a_banned_op_names_its_pass_node_line_and_the_safe_form() -> None:
    policy = Policy("O1", torch.float16).with_ops(low=["binary_cross_entropy"])
    with pytest.raises(BannedOpError) as caught:
        amp_compile(Banned(), policy=policy)(torch.randn(4))
    error = caught.value
    assert error.pass_name == "assign_precision"
    assert error.node == "binary_cross_entropy"
    assert "test_errors.py" in error.source
    assert "in forward: return nn.functional.binary_cross_entropy" in error.source
    assert "binary_cross_entropy_with_logits" in error.hint
    assert error.hint in str(error)


def test_a_suggestion_is_a_hint() -> None:
    with pytest.raises(UnknownOpError) as op:
        Policy().with_ops(low=["liner"])
    assert op.value.hint.startswith("Did you mean 'linear'")
    with pytest.raises(ArgumentError) as level:
        amp_compile(nn.Linear(2, 2), level="o2")
    assert level.value.hint == "Did you mean 'O2'?"
    with pytest.raises(PolicyError) as module:
        amp_compile(nn.Sequential(nn.Linear(2, 2)), exclude=["encoder"])
    assert module.value.hint == "Paths look like: 0."


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1


def test_a_model_that_is_not_one_graph_names_the_line() -> None:
    with pytest.raises(CaptureError) as caught:
        amp_compile(Breaks(), fullgraph=True)(torch.ones(2))
    assert caught.value.source.endswith("in forward: torch._dynamo.graph_break()")
    assert f"a graph break at {caught.value.source} (" in str(caught.value)
    assert str(caught.value).endswith(f"). {caught.value.hint}")
    assert caught.value.hint.startswith("Leave fullgraph off")


class Depends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


def test_a_model_that_cannot_be_exported_names_the_line() -> None:
    with pytest.raises(CaptureError) as caught:
        convert_model(Depends().eval(), (torch.ones(2),))
    assert "in forward: return x + 1 if x.sum() > 0 else x" in caught.value.source
    assert caught.value.source in str(caught.value)
    assert caught.value.hint.startswith("If the inputs are right")
