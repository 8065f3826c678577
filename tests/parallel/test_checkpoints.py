"""``save_checkpoint`` and ``load_checkpoint`` in a single process; ``test_sharded.py`` has those of several."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_compiler import CheckpointError, compile_train_step
from amp_compiler.parallel.checkpoints import load_checkpoint, save_checkpoint

BATCH = torch.ones(4, 6), torch.zeros(4, dtype=torch.long)


def make(seed: int = 0, width: int = 8) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return compile_train_step(model, nn.functional.cross_entropy, optimizer, dtype=torch.bfloat16, accumulate_steps=2)


def test_a_run_continues_bit_for_bit(tmp_path: Path) -> None:
    first, second = make(), make(seed=1)
    for _ in range(3):  # the last one waits for an update
        first(*BATCH)
    save_checkpoint(first, tmp_path / "last")
    load_checkpoint(second, tmp_path / "last")
    for _ in range(3):
        assert torch.equal(first(*BATCH).loss, second(*BATCH).loss)
    for mine, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_checkpoint_before_survives_a_run_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make()
    save_checkpoint(step, tmp_path / "last")
    kept = copy.deepcopy(step.state_dict())
    step(*BATCH)
    step(*BATCH)
    import torch.distributed.checkpoint.state_dict_saver as saver

    def dies(state: Any, checkpoint_id: Path, **options: Any) -> None:
        checkpoint_id.mkdir()
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(saver, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(step, tmp_path / "last")
    load_checkpoint(step, tmp_path / "last")
    for key, value in step.state_dict()["model"].items():
        assert torch.equal(value, kept["model"][key])
    monkeypatch.undo()
    save_checkpoint(step, tmp_path / "last")  # what the dead run left is no obstacle
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_a_run_that_died_between_two_renamings(tmp_path: Path) -> None:
    step = make()
    save_checkpoint(step, tmp_path / "last")
    (tmp_path / "last").rename(tmp_path / ".last.old")
    load_checkpoint(make(seed=1), tmp_path / "last")


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*nowhere"):
        load_checkpoint(make(), tmp_path / "nowhere")


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    save_checkpoint(make(), tmp_path / "last")
    other = make(seed=1, width=5)
    before = copy.deepcopy(other.state_dict()["model"])
    with pytest.raises(CheckpointError, match=r"The model of the checkpoint.*Nothing was changed"):
        load_checkpoint(other, tmp_path / "last")
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict()["model"].items())
