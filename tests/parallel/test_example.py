"""``examples/distributed_digits.py`` under torchrun: it learns, and continues with another number of processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
SCRIPT = Path(__file__).parents[2] / "examples/distributed_digits.py"


def torchrun(ranks: int, *arguments: object) -> tuple[list[float], str]:
    """(the mean loss of each epoch, all that was printed)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    done = subprocess.run(
        [*command, *map(str, arguments)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", done.stdout)], done.stdout


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["data", "sharded"])
def test_it_learns_and_continues(way: str, tmp_path: Path) -> None:
    given = ("--parallel", way, "--epochs", 3, "--checkpoint", tmp_path / "last")
    losses, printed = torchrun(2, *given)
    assert losses[-1] < 0.3 * losses[0]
    assert "continuing" not in printed
    later, printed = torchrun(1, *given)
    assert "continuing from" in printed
    assert later[0] < losses[-1]
