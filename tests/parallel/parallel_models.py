"""Models that several modules of cases share."""

from __future__ import annotations

import torch
from torch import nn


class Broken(nn.Module):
    """A model with a graph break in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.relu(x))


class Switch(nn.Module):
    """A second layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        out: torch.Tensor = self.always(x)
        return out + self.sometimes(x) if both else out
