"""A small network to look at, and the browser tests' pages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amp_compiler.inspection import Inspection, inspect_model
from amp_compiler.policy import Policy


class Small(nn.Module):
    """Two linear layers and a softmax: every kind of node, few of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.second(self.norm(torch.relu(self.first(x)))), dim=-1)


def inspect_small(graph: str = "forward", level: str = "O2", dtype: torch.dtype = torch.bfloat16) -> Inspection:
    torch.manual_seed(0)
    return inspect_model(Small(), (torch.randn(8, 16),), policy=Policy(level, dtype), graph=graph, capture="export")
