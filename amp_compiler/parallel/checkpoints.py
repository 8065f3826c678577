"""Checkpoints of a training step that several processes write and read together, in any number."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.errors import CheckpointError

#: dictionaries whose keys depend on how far a run has come
_GROWING = (("optimizer", "state"), ("window", "saved"), ("window", "gradients"), ("contents",), ("rng",))


def save_checkpoint(step: Any, folder: str | Path) -> None:
    """Save ``step.state_dict()`` by ``torch.distributed.checkpoint``, each process its own part.

    All processes of the group must call it. The folder is written under another name and renamed when it is complete,
    so that a run that dies while it saves leaves the checkpoint before it as it was.

    Examples:
        >>> import tempfile, torch
        >>> from amp_compiler import compile_train_step
        >>> from amp_compiler.parallel.checkpoints import load_checkpoint, save_checkpoint
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = compile_train_step(model, torch.nn.functional.mse_loss, optimizer)
        >>> with tempfile.TemporaryDirectory() as root:
        ...     save_checkpoint(step, f"{root}/last")
        ...     load_checkpoint(step, f"{root}/last")
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = Path(folder).absolute()
    aside, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    if _is_first():
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
    _all_wait()
    save(step.state_dict(), checkpoint_id=aside, no_dist=not dist.is_initialized())
    _all_wait()
    if _is_first():
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    _all_wait()


def load_checkpoint(step: Any, folder: str | Path) -> None:
    """Continue from what ``save_checkpoint`` wrote. The processes may be more or fewer than those that saved it.

    All processes of the group must call it. If the checkpoint does not fit, a ``CheckpointError`` says why.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = Path(folder).absolute()
    old = folder.with_name(f".{folder.name}.old")
    if not folder.exists() and old.exists():  # the run died between two renamings
        folder = old
    if not (folder / ".metadata").exists():
        raise CheckpointError(f"There is no checkpoint in {folder}: its file .metadata is missing.")
    metadata = FileSystemReader(folder).read_metadata()
    state = step.state_dict()
    paths = _wanted(metadata.planner_data)
    values = {key: _place_for(step, state, paths[key], metadata.state_dict_metadata[key]) for key in paths}
    load(values, checkpoint_id=folder, no_dist=not dist.is_initialized())
    for path in _GROWING:
        _set(state, path, {})
    if ("fresh",) not in paths.values():
        state.pop("fresh", None)
    for key, path in paths.items():
        _set(state, path, values[key])
    step.load_state_dict(state)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _all_wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def _wanted(planned: Any) -> dict[str, tuple[Any, ...]]:
    """Key in the checkpoint -> path in the state: all but the random generators of other processes."""
    paths = {key: tuple(path) for key, path in planned.items()}
    ranks = sorted({path[1] for path in paths.values() if path[0] == "rng"}, key=str)
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = f"rank{rank}" if f"rank{rank}" in ranks else (ranks or [""])[rank % max(len(ranks), 1)]
    return {key: path for key, path in paths.items() if path[0] != "rng" or isinstance(own, int) or path[1] == own}


def _place_for(step: Any, state: Any, path: tuple[Any, ...], saved: Any) -> Any:
    """A tensor to load into, divided as the parameter that it belongs to; None for what is no tensor."""
    size, properties = getattr(saved, "size", None), getattr(saved, "properties", None)
    if size is None or properties is None:
        return None
    like: Any = None
    if path[:2] == ("optimizer", "state"):
        parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
        like = parameters[int(path[2])] if int(path[2]) < len(parameters) else None
    elif path[:2] == ("window", "gradients"):
        like = state["model"].get(path[2])
    elif path[0] == "model":
        like = state["model"].get(path[1])
    if isinstance(like, Tensor) and like.shape == size:
        return torch.zeros_like(like, dtype=properties.dtype, requires_grad=False).detach()
    return torch.zeros(size, dtype=properties.dtype)


def _set(state: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value into nested dictionaries and lists, which are made where they are missing."""
    for place, key in enumerate(path):
        if path[:place] == ("optimizer", "state"):
            key = int(key)
        if isinstance(state, list):
            state += [None] * (int(key) + 1 - len(state))
        if place == len(path) - 1:
            state[key] = value
            return
        held = state[key] if isinstance(state, list) or key in state else None
        follows: Any = [] if isinstance(path[place + 1], int) else {}
        if not isinstance(held, type(follows)):
            state[key] = held = follows
        state = held
