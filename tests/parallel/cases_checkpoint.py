"""What ranks do with checkpoints of ``Sharded`` runs; ``test_checkpoints.py`` says what must come of it.

The cases of runs with another number of ranks find each other's checkpoints in the folder ``AMP_TEST_FOLDER``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases_sharded import CASES as OTHERS
from cases_sharded import Tied, compiled
from torch.distributed import checkpoint
from worker_settings import by_rule

from amp_compiler import Sharded
from amp_compiler.parallel.checkpoints import load_checkpoint, save_checkpoint

Batch = tuple[torch.Tensor, torch.Tensor]


def _batch(number: int) -> Batch:
    """This rank's part of a batch that does not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randint(0, 11, (16,), generator=generator) for _ in range(2))
    rank, size = dist.get_rank(), dist.get_world_size()
    return x.chunk(size)[rank], y.chunk(size)[rank]


def _step(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    options = {"dtype": torch.bfloat16, "adam": True, **options}
    return compiled(Tied(), parallel=Sharded(), **options)


def _train(step: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = step(*_batch(number)).loss.clone()
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    return losses


def _folder(name: str) -> Path:
    root = os.environ.get("AMP_TEST_FOLDER")
    if root is None:
        given = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(given, src=0)
        root = str(given[0])
    return Path(root) / name


def again(**options: Any) -> dict[str, Any]:
    """Saved and resumed by as many ranks: into a new step, and by the calls of torch alone."""
    first = _step(**options)
    _train(first, range(3))
    folder = _folder("again")
    save_checkpoint(first, folder)
    checkpoint.save(first.state_dict(), checkpoint_id=folder.with_name("plain"))
    going_on = _train(first, range(3, 6))
    second, third = _step(seed=1, **options), _step(seed=2, **options)
    plain: list[float] = []
    with by_rule():  # the graphs are those of the first step
        load_checkpoint(second, folder)
        resumed = _train(second, range(3, 6))
        if options.get("accumulate_steps", 1) == 1:
            state = third.state_dict()
            checkpoint.load(state, checkpoint_id=folder.with_name("plain"))
            third.load_state_dict(state)
            plain = _train(third, range(3, 6))
    left = sorted(path.name for path in folder.parent.iterdir())
    return {"going_on": going_on, "resumed": resumed, "plain": plain, "left": left}


def save(name: str) -> dict[str, Any]:
    """Train a little, save, go on."""
    step = _step()
    _train(step, range(3))
    save_checkpoint(step, _folder(name))
    return {"losses": _train(step, range(3, 6))}


def resume(source: str, target: str, numbers: range) -> dict[str, Any]:
    """Go on from what other ranks saved, and save again."""
    step = _step(seed=1)
    load_checkpoint(step, _folder(source))
    losses = _train(step, numbers)
    save_checkpoint(step, _folder(target))
    return {"losses": losses}


def alone() -> dict[str, Any]:
    """Go on in a step that is not divided."""
    torch.manual_seed(1)
    step = compiled(Tied(), dtype=torch.bfloat16, adam=True)
    load_checkpoint(step, _folder("by4"))
    return {"losses": _train(step, range(3, 6))}


CASES: dict[str, Callable[[], Any]] = {
    **OTHERS,
    "again": again,
    "again in the middle of an update": lambda: again(accumulate_steps=2),
    "save": lambda: save("by4"),
    "save by two": lambda: save("by2saved"),
    "resume by as many": lambda: resume("by4", "by4again", range(3, 6)),
    "resume by fewer": lambda: resume("by4", "by2", range(3, 6)),
    "resume by more": lambda: resume("by2saved", "by4more", range(3, 6)),
    "resume by one": lambda: resume("by2", "by1", range(6, 9)),
    "alone": alone,
}
