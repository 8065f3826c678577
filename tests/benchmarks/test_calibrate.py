"""The memory of a calibration beside that of a training step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amp_compiler import calibrate
from harness import peak_bytes


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def test_no_tensor_is_kept() -> None:
    """Two batches need at most 1.2 times the memory of one training step."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(128), Block(128), nn.Linear(128, 8))
    x, targets = torch.randn(2048, 128), torch.zeros(2048, 8)

    def step() -> None:
        model.zero_grad()
        loss_fn(model(x), targets).backward()

    assert peak_bytes(lambda: calibrate(model, [(x, targets)] * 2, loss_fn)) <= 1.2 * peak_bytes(step)
