"""What two ranks do with ``Sharded``; ``test_sharded.py`` says what must come of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from amp_compiler import Sharded, compile_train_step


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 4))


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def _compile(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return compile_train_step(model, nn.functional.cross_entropy, optimizer, **options)


def thin(**options: Any) -> dict[str, Any]:
    model = nn.Linear(8, 5)
    alone = copy.deepcopy(model)
    step = _compile(model, parallel=Sharded(), dtype=torch.bfloat16, **options)
    single = _compile(alone, dtype=torch.bfloat16, **options)
    single(*_batch(0))
    result = step(*_batch(0))
    unequal = []
    for (name, parameter), twin in zip(model.named_parameters(), alone.parameters(), strict=True):
        mean = twin.grad.clone().div_(dist.get_world_size())
        dist.all_reduce(mean)
        whole = parameter.grad.full_tensor()
        if not torch.equal(whole, mean):
            unequal.append((name, whole.tolist(), mean.tolist()))
    return {"unequal": unequal, "updated": bool(result.updated)}


CASES: dict[str, Callable[[], Any]] = {
    "thin": thin,
}
