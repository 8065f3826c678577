"""Accelerate and the Hugging Face Trainer in several processes, and resumed in a new one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.hf_worker import RATE, SAVED_AFTER, UPDATES
from integrations.trainer_loops import make_batches, make_model, own_loop

WORKER = Path(__file__).with_name("hf_worker.py")
pytestmark = [pytest.mark.trainers, pytest.mark.slow]


def run(kind: str, case: str, folder: Path, dtype: str, ranks: int = 0) -> list[dict[str, Any]]:
    """Run a case in a new process, or in ``ranks`` of them; return what each has left behind."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(WORKER), kind, case, str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [torch.load(folder / f"{case}-{rank}.pt") for rank in range(max(ranks, 1))]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["accelerate", "trainer"])
def test_a_run_that_is_resumed_in_a_new_process_is_the_same(kind: str, dtype: str, tmp_path: Path) -> None:
    (whole,) = run(kind, "whole", tmp_path, dtype)
    if kind == "accelerate":
        run(kind, "begin", tmp_path, dtype)
    (resumed,) = run(kind, "resume", tmp_path, dtype)
    assert same(whole["weights"], resumed["weights"])
    if kind == "accelerate":
        assert resumed["scales"] == whole["scales"][SAVED_AFTER:]
    else:  # the logs are in the checkpoint
        assert resumed["scales"] == whole["scales"]
        assert resumed["losses"] == whole["losses"]
        assert resumed["skipped"] == whole["skipped"]
    if dtype == "float16":
        assert len(set(whole["scales"])) > 2, "the scale has neither fallen nor grown: the test shows nothing"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["accelerate", "trainer"])
def test_two_processes_are_one_with_accumulation(kind: str, dtype: str, tmp_path: Path) -> None:
    one, other = run(kind, "overflow" if kind == "accelerate" else "whole", tmp_path, dtype, ranks=2)
    assert same(one["weights"], other["weights"])
    model = make_model()
    own = own_loop(
        model, torch.optim.AdamW(model.parameters(), RATE), make_batches(2 * UPDATES), dtype=getattr(torch, dtype),
        accumulate=2, clip=1.0,
    )  # fmt: skip
    assert one["own"]
    assert one["low"][dtype] > 20
    if kind == "trainer" or dtype == "float16":  # without a scaler, the overflow below has ruined the weights
        assert same(one["weights"], own.weights)
    if kind == "accelerate" and dtype == "float16":
        for found in (one, other):
            assert found["skipped"]
            assert found["same"]
            assert not found["moved"]
