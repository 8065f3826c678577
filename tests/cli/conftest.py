"""A user's file with models, and the command line run in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from amp_compiler.cli.app import app

MODEL = '''
"""What a user has: a class, a function that makes a model with its inputs, and some mistakes."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return torch.softmax(self.head(self.blocks(x)), dim=-1)


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            x = x + 1
        return self.second(x)


def make():
    torch.manual_seed(0)
    return Net(), (torch.randn(8, 16),)


def needs(width):
    return Block(width)


def fails():
    raise RuntimeError("no weights here")


def breaks():
    return Breaks(), (torch.ones(2, 4),)


plain = nn.Linear(16, 4)
number = 3


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=generator)]


def error(compiled):
    with torch.no_grad():
        return float((compiled(batches()[0]) - compiled.original(batches()[0])).abs().max())
'''


@pytest.fixture(scope="session")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model.py``."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "model.py").write_text(MODEL)
    (folder / "broken.py").write_text("import torch\nraise ValueError('half written')\n")
    return folder


@pytest.fixture
def run(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Run ``amp-compiler`` with arguments, in the user's folder. pytest's workers set a width."""
    monkeypatch.delenv("COLUMNS", raising=False)
    before = os.getcwd()
    os.chdir(user_folder)
    yield lambda *args: CliRunner().invoke(app, [str(a) for a in args])
    os.chdir(before)
