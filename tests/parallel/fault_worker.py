"""A training run whose second rank is killed: ``torchrun fault_worker.py WAY WHERE FOLDER``; see ``test_faults.py``."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from amp_compiler import DataParallel, ParallelError, Sharded, compile_train_step
from amp_compiler.parallel.checkpoints import load_checkpoint, save_checkpoint


def die(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def leave_alone(folder: Path) -> None:
    """Rank 1 uses another parameter in its second step; rank 0 does not."""
    from parallel_models import Switch  # torchrun puts this folder on the path

    from amp_compiler.parallel import agreement

    agreement.PATIENCE = timedelta(seconds=5)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = Switch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = compile_train_step(model, nn.functional.cross_entropy, optimizer, parallel=DataParallel())
    batch = torch.ones(4, 8), torch.arange(4)
    step((batch[0], False), batch[1])
    try:
        step((batch[0], dist.get_rank() == 1), batch[1])
    except ParallelError as error:
        (folder / f"told-{dist.get_rank()}").write_text(str(error))
        raise


def main(way: str, where: str, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    step = compile_train_step(
        model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), 1e-2), dtype=torch.float16,
        parallel=DataParallel() if way == "data" else Sharded(),
    )  # fmt: skip
    batch = torch.ones(4, 8) * (dist.get_rank() + 1), torch.arange(4)
    if where == "resume":
        load_checkpoint(step, folder / "last")
    else:
        for _ in range(3):
            step(*batch)
        save_checkpoint(step, folder / "last")
    loss = float(step(*batch).loss)
    (folder / f"{where}-{dist.get_rank()}").write_text(repr(loss))
    if where == "resume":
        dist.destroy_process_group()
        return
    if dist.get_rank() == 1 and where == "checkpoint":
        FileSystemWriter.write_data = die  # type: ignore[method-assign]
    if where == "checkpoint":
        save_checkpoint(step, folder / "last")
    if dist.get_rank() == 1:
        die()
    step(*batch)  # rank 0 waits here for gradients that never come
    (folder / "went on").touch()


if __name__ == "__main__":
    if sys.argv[2] == "alone":
        leave_alone(Path(sys.argv[3]))
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
