"""Data parallelism over NCCL, one process per GPU; without several GPUs the same code runs over gloo on CPUs.

``python several_gpus.py RANK WORLD DEVICE FILE``: one process of several, which meet by the file. Rank 0 prints what
differs.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_compiler import DataParallel, amp_compile, compile_train_step

LOW = torch.bfloat16


def loss_fn(output: Tensor, targets: Any) -> Tensor:
    return (output.float() ** 2).mean()


def step(model: nn.Module, inputs: Tensor, **kwargs: Any) -> list[Tensor]:
    """The gradients of a compiled training step, and the parameters after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = compile_train_step(model, loss_fn, optimizer, level="O2", dtype=LOW, backend="eager", **kwargs)
    run(inputs)
    return [*gradients(model), *(p.detach() for p in model.parameters())]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def mean(values: list[Tensor]) -> list[Tensor]:
    """The mean over all processes."""
    found = [value / dist.get_world_size() for value in values]
    for value in found:
        dist.all_reduce(value)
    return found


def differences(device: torch.device) -> list[str]:
    """Where gradients by two ways of data parallelism are not the mean of what each process computes by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 8)).to(device)
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(8, 16, device=device)
    count = len(list(model.parameters()))

    alone = mean(step(copy.deepcopy(model), inputs)[:count])
    together = step(copy.deepcopy(model), inputs, parallel=DataParallel())
    single, ours = copy.deepcopy(model), copy.deepcopy(model)
    loss_fn(amp_compile(single, "O2", dtype=LOW, backend="eager")(inputs), None).backward()
    eager = mean(gradients(single))
    wrapped = DistributedDataParallel(amp_compile(ours, "O2", dtype=LOW, backend="eager"))  # lives until the backward
    loss_fn(wrapped(inputs), None).backward()

    bound = {} if dist.get_world_size() == 2 else {"rtol": 1e-6, "atol": 1e-7}  # the order of more than two terms
    found = []
    for name, mine, wanted in (("step", together[:count], alone), ("DDP", gradients(ours), eager)):
        for at, (a, b) in enumerate(zip(mine, wanted, strict=True)):
            if not (torch.allclose(a, b, **bound) if bound else torch.equal(a, b)):
                found.append(f"{name}: gradient {at} by {(a - b).abs().max().item()}")
    for at, value in enumerate(together[count:]):
        others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(others, value.contiguous())
        if not all(torch.equal(value, other) for other in others):
            found.append(f"parameter {at} is not the same on all ranks")
    return found


def main(rank: int, world: int, kind: str, file: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=dist.FileStore(str(file), world), rank=rank, world_size=world
    )
    try:
        found = differences(device)
        if rank == 0:
            print(json.dumps({"backend": dist.get_backend(), "world": world, "differences": found}))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
