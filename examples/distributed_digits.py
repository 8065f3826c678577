"""Train on handwritten digits with several processes, in mixed precision, and continue from a checkpoint.

    torchrun --nproc-per-node 2 examples/distributed_digits.py --parallel data
    torchrun --nproc-per-node 2 examples/distributed_digits.py --parallel sharded --checkpoint /tmp/digits

The two ways differ in what each process holds: ``data`` keeps the whole model in each, ``sharded`` some rows of every
parameter, of its gradient and of the optimizer's state. Started again with the same ``--checkpoint``, the run continues
where it was, also with another number of processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

from amp_compiler import DataParallel, Sharded, compile_train_step
from amp_compiler.parallel.checkpoints import load_checkpoint, save_checkpoint

SEED = 0
BATCH = 64  # of all processes together


def make_network() -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def my_batches(epoch: int, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The batches of this process: all processes shuffle alike, and each takes its part of every batch."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    batches = order[: len(order) // BATCH * BATCH].view(-1, BATCH)
    own = batches.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    return [(images[rows], labels[rows]) for rows in own]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=("data", "sharded"), default="data")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--checkpoint", type=Path, help="a folder to continue from, and to save to after each epoch")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)

    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    parallel = DataParallel() if options.parallel == "data" else Sharded()
    step = compile_train_step(
        model, nn.functional.cross_entropy, optimizer, level="O2", dtype=options.dtype, parallel=parallel
    )
    if options.checkpoint is not None and options.checkpoint.exists():
        load_checkpoint(step, options.checkpoint)
        if first:
            print(f"continuing from {options.checkpoint}")
    for epoch in range(options.epochs):
        losses = [step(*batch).loss for batch in my_batches(epoch, images, labels)]
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean.div_(dist.get_world_size()))
        if options.checkpoint is not None:
            save_checkpoint(step, options.checkpoint)
        if first:
            assert step.scaler is not None
            print(f"epoch {epoch}: loss {float(mean):.4f}, loss scale {step.scaler.get_scale():g}")
    if first:
        print(step.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
