"""The examples run, and compute what they say they do. (``examples/digits.py`` is ``make demo``.)"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As Python finds them for a script: the examples' own folder comes first."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


def test_tutorial(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    precisions, found = load("mixed_precision_tutorial", monkeypatch).main()

    low = {name: counts.get("float16", 0) for name, counts in precisions.items()}
    assert low["O0"] == 0
    assert 0 < low["O1"] < low["auto"] < low["O2"]  # gelu is fp32, then follows its input, then low
    assert low["set_precision"] == low["precision region"] == 5  # two linears, the norm, two gelus
    assert precisions["set_precision"]["float32"] == 2  # flatten and the last linear

    hand, dynamic, static = found["loop by hand"], found["compiled, dynamic"], found["compiled, static"]
    assert hand.losses == dynamic.losses
    assert hand.scales == dynamic.scales
    assert hand.skipped == dynamic.skipped > 0
    assert dynamic.scales[0] > dynamic.scales[-1]  # too large at first
    assert any(later > earlier for earlier, later in zip(hand.scales, hand.scales[1:], strict=False))  # and grows again
    assert static.skipped == 0
    assert set(static.scales) == {1024.0}
    for training in found.values():
        assert training.accuracy > 0.93
        assert training.losses[-1] < 0.1
    assert "bit for bit: True" in capsys.readouterr().out


def test_gradient_accumulation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("gradient_accumulation", monkeypatch)
    hand, step = example.main()

    assert hand.losses == step.losses
    assert len(hand.losses) == example.BATCHES
    assert hand.updates == step.updates == example.BATCHES // example.ACCUMULATE
    assert step.losses[-1] < 0.7 * step.losses[0]
    for name, weight in hand.weights.items():
        assert torch.equal(weight, step.weights[name]), name
    assert capsys.readouterr().out.count("bit for bit") == 2


def test_two_gears(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    drives = load("two_gears", monkeypatch).main()

    automatic, manual = drives["automatic"], drives["manual, no work"]
    assert automatic.losses == manual.losses
    for name, weight in automatic.weights.items():
        assert torch.equal(weight, manual.weights[name]), name

    clipped, compiled = drives["manual, clipped"], drives["compiled, clipped"]
    assert clipped.losses == pytest.approx(compiled.losses, rel=1e-3)  # the norms are added up in another order
    assert clipped.losses != automatic.losses
    assert drives["manual, centred"].losses != automatic.losses
    for name, drive in drives.items():
        assert drive.accuracy > 0.85, name
    assert "bit for bit: True" in capsys.readouterr().out
