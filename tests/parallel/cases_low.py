"""What two ranks do with parameters that are stored in bf16; ``test_low.py`` says what must come of it."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import Broken
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker_settings import by_rule

from amp_compiler import ArgumentError, DataParallel, ParallelError, Sharded, compile_train_step
from amp_compiler.parallel.checkpoints import load_checkpoint, save_checkpoint
from amp_compiler.training.masters import MASTER

BF16 = torch.bfloat16


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _batch(seed: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    return torch.randn(6, 8, generator=generator).to(dtype), torch.randint(0, 4, (6,), generator=generator)


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), targets)


def _compile(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return compile_train_step(model, _loss, optimizer, dtype=BF16, **options)


def _sums(step: Any) -> dict[str, float]:
    """Of everything that the step keeps, whole: equal in all ranks, and equal for equal values."""
    found = {}
    for name, parameter in step.model.named_parameters():
        for key, value in {"": parameter.detach(), **step.optimizer.state[parameter]}.items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
            found[f"{name} {key}"] = float(full.double().sum())
    return found


def together(make: Callable[[], nn.Module] = sequential, **options: Any) -> dict[str, Any]:
    """A few updates of a bf16 model, and of its fp32 copy."""
    torch.manual_seed(dist.get_rank())  # rank 0's parameters must win
    low = make().to(BF16)
    wide = copy.deepcopy(low).float()
    step, other = _compile(low, **options), _compile(wide, **{**options, "master_weights": True})
    for number in range(4):
        step(*_batch(number))
        other(*_batch(number, torch.float32))
    masters = {name.replace(MASTER, ""): value for name, value in _sums(step).items() if name.endswith(MASTER)}
    return {"sums": _sums(step), "masters": masters, "fp32": {n: v for n, v in _sums(other).items() if n in masters}}


def resumed() -> dict[str, Any]:
    """Masters are divided like their parameters, also in a checkpoint."""
    torch.manual_seed(0)
    step = _compile(sequential().to(BF16), parallel=Sharded())
    step(*_batch(0))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    save_checkpoint(step, Path(folder[0]) / "last")
    again = _compile(sequential().to(BF16), parallel=Sharded())
    load_checkpoint(again, Path(folder[0]) / "last")
    with by_rule():  # both have one graph, which was verified in the first step
        for run in (step, again):
            run(*_batch(1))
    parts = sorted({len(step.optimizer.state[p][MASTER].to_local()) for p in step.model.parameters()})
    return {"sums": _sums(step), "again": _sums(again), "rows": parts}


def _whole(model: nn.Module) -> list[torch.Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = wrap(sequential().to(BF16))
    before = _whole(model)
    step = _compile(model)
    for number in range(4):
        step(*_batch(number))
    moved = [not torch.equal(a, b) for a, b in zip(before, _whole(model), strict=True)]
    return {"sums": _sums(step), "masters": [MASTER in step.optimizer.state[p] for p in model.parameters()],
            "moved": moved}  # fmt: skip


class Partly(Broken):
    """A layer that only the first process uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + self.extra(x) if dist.get_rank() == 0 else out


def refused() -> str:
    try:
        _compile(sequential().to(BF16), parallel=Sharded(), master_weights="stochastic")
    except ArgumentError as error:
        return str(error)
    return "no error"


def disagreement() -> str:
    try:
        _compile(sequential().to(BF16), parallel=DataParallel(), master_weights=dist.get_rank() == 0 or "kahan")
    except ParallelError as error:
        return str(error)
    return "no error"


CASES: dict[str, Callable[[], Any]] = {
    "data": lambda: together(parallel=DataParallel(), accumulate_steps=2),
    "data in pieces": lambda: together(Broken, parallel=DataParallel()),
    "data, used by one": lambda: together(Partly, parallel=DataParallel()),
    "data stochastic": lambda: together(parallel=DataParallel(), master_weights="stochastic"),
    "data kahan": lambda: together(parallel=DataParallel(), master_weights="kahan"),
    "sharded": lambda: together(parallel=Sharded(), accumulate_steps=2),
    "sharded kahan": lambda: together(parallel=Sharded(), master_weights="kahan"),
    "resumed": resumed,
    "DDP": lambda: wrapped(DistributedDataParallel),
    "FSDP2": lambda: wrapped(fully_shard),
    "refused": refused,
    "disagreement": disagreement,
}
