"""A rank that dies: the others end, and the last checkpoint is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "fault_worker.py"


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.distributed
@pytest.mark.parametrize("where", ["step", "checkpoint"])
@pytest.mark.parametrize("way", ["data", "sharded"])
def test_a_killed_rank_ends_the_run_and_leaves_the_checkpoint(way: str, where: str, tmp_path: Path) -> None:
    died = torchrun(way, where, tmp_path)
    assert died.returncode != 0
    assert "SIGKILL" in died.stderr or "-9" in died.stderr
    assert not (tmp_path / "went on").exists()
    again = torchrun(way, "resume", tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    for rank in range(2):  # the step after the checkpoint, in the run that died and in the one that continues
        assert (tmp_path / f"resume-{rank}").read_text() == (tmp_path / f"{where}-{rank}").read_text()


@pytest.mark.distributed
def test_a_rank_that_takes_another_way_alone_says_so(tmp_path: Path) -> None:
    died = torchrun("data", "alone", tmp_path)
    assert died.returncode != 0
    told = (tmp_path / "told-1").read_text()
    assert "sometimes.weight" in told
    assert "rank 0 did" in told
    assert "find_unused_parameters=True" in told
