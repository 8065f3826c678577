"""benchmarks/compiling.py: calls that compile, and the import, beside torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmark_helpers import load

compiling = load("compiling")


class Tiny(nn.Module):
    """Called as the models of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(compiling.VOCABULARY, 4)

    def forward(self, input_ids: torch.Tensor) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(last_hidden_state=self.table(input_ids))


def test_every_call_has_its_peer_in_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "make", lambda name, layers: Tiny())
    monkeypatch.setattr(compiling.Subject, "compiled", lambda self, model, variant: model)
    monkeypatch.setattr(compiling, "started", lambda command: 0.2)
    given = ["--rounds", "2", "--imports", "1", "--models", "bert", "--out", str(tmp_path)]
    args = compiling.parser().parse_args(given)
    run = compiling.Run("compiling", "calls", args)
    compiling.measure_calls(args, run)
    compiling.measure_import(args, run)
    assert len(run.rows) == 2 * 2 * len(compiling.CALLS) + 2
    keys = [row.key for row in run.rows]
    assert all(row.reference in keys for row in run.rows if row.reference is not None)
    for row in run.rows:
        row.samples["cpu_seconds"] = [2.0 if row.key["variant"] == compiling.OURS else 1.0] * 2
    found = compiling.ratios(run)
    assert set(found) == {"bert, training", "bert, inference"}
    assert {value.median for calls in found.values() for value in calls.values()} == {2.0}
    compiling.show(run)
    assert "new batch size" in capsys.readouterr().out
