"""Data parallelism by several processes: over NCCL where there are several GPUs, else over gloo on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("several_gpus.py")


def run_processes(kind: str, world: int, meet: Path) -> Any:
    """What rank 0 prints, of as many processes as there are devices."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, str(SCRIPT), str(rank), str(world), kind, str(meet)] for rank in range(world)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for command in commands]
    try:
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * world, [errors[-2000:] for _, errors in said]
    return json.loads(said[0][0].splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.distributed
def test_gradients_are_the_mean_over_all_processes(tmp_path: Path) -> None:
    several = torch.cuda.is_available() and torch.cuda.device_count() > 1
    kind, world = ("cuda", torch.cuda.device_count()) if several else ("cpu", 2)
    found = run_processes(kind, world, tmp_path / "meet")
    assert found == {"backend": "nccl" if several else "gloo", "world": world, "differences": []}
