"""benchmarks/health.py: updates that are sampled beside updates that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark_helpers import load

health = load("health")


def test_the_cost_is_a_share_of_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = health.parser().parse_args(["--rounds", "1", "--out", str(tmp_path)])
    run = health.Run("health", "sampled", args)
    subject = health.SUBJECTS["nine_256"].tiny
    health.measure(subject, args, run)
    assert [row.key["variant"] for row in run.rows] == [health.PEER, health.OURS]
    run.rows[0].samples["cpu_seconds"], run.rows[1].samples["cpu_seconds"] = [1.0], [2.0]
    assert health.ratios(run)[subject.name].median == 2.0
    health.show(run, every=50)
    told = capsys.readouterr().out
    assert "2.0%" in told
    assert "All within 3%." in told
    health.show(run, every=20)
    assert f"Over the aim of 3%: {subject.name}." in capsys.readouterr().out
