"""benchmarks/overhead.py: calls and steps of one layer beside their peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark_helpers import load

overhead = load("overhead")


def test_every_kind_of_call_has_its_peer_in_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = overhead.parser().parse_args(["--rounds", "1", "--repeats", "1", "--out", str(tmp_path)])
    run = overhead.Run("overhead", "calls", args)
    overhead.measure(args, run)
    keys = {(row.key["kind"], row.key["variant"]) for row in run.rows}
    for kind, peer in overhead.PEERS.items():
        assert {(kind, peer), (kind, overhead.OURS)} <= keys
    for row in run.rows:
        row.samples["cpu_seconds"] = [2e-6 if row.key["variant"] == overhead.OURS else 1e-6]
    assert {value.median for value in overhead.ratios(run).values()} == {2.0}
    overhead.show(run)
    assert "inference" in capsys.readouterr().out
