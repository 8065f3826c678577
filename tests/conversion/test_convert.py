"""convert_model: what it gives back, in memory and in a file that torch alone reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

import amp_compiler
from amp_compiler import convert_model, load_converted
from helpers import BF16, F16, F32, LOW


class Small(nn.Module):
    """A convolution with batch norm, dropout and a linear layer; gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.conv(x)).relu()
        return {"logits": self.head(self.drop(y).mean((2, 3)))}


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Small().eval()
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 2)
    return model, torch.randn(2, 3, 8, 8)


def test_it_runs_saves_and_loads_where_only_torch_is(tmp_path: Path) -> None:
    for low in LOW:
        folder = tmp_path / str(low)
        folder.mkdir()
        save_and_load(low, folder)
    script = """
import os, sys, torch
for folder in os.listdir():
    x, out = torch.load(f"{folder}/x.pt")
    found = torch.export.load(f"{folder}/model.pt2").module()(x)
    assert torch.equal(found["logits"], out), (folder, found, out)
assert not [m for m in sys.modules if m.startswith(("amp_compiler", "transformers"))]
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def save_and_load(low: torch.dtype, folder: Path) -> None:
    model, x = small()
    converted = convert_model(model, (x,), dtype=low, dynamic_shapes={"x": {0: Dim("batch")}})
    out = converted(x)["logits"]
    assert out.dtype is F32
    torch.testing.assert_close(out, model(x)["logits"], rtol=0.02, atol=0.02)  # a few roundings of 2**-8
    assert converted(torch.randn(5, 3, 8, 8))["logits"].shape == (5, 4)
    converted.save(folder / "model.pt2")
    again = load_converted(folder / "model.pt2")
    assert torch.equal(again(x)["logits"], out)
    assert again.report() == converted.report()
    assert again.policy == converted.policy
    torch.save((x, out), folder / "x.pt")


def test_the_model_is_left_alone_and_shares_no_memory() -> None:
    model, x = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = convert_model(model, (x,), dtype=BF16)
    out = converted(x)["logits"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype is before[name].dtype
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert torch.equal(converted(x)["logits"], out)


def test_the_public_names_are_there() -> None:
    assert amp_compiler.convert_model is convert_model
    assert isinstance(convert_model(nn.Linear(2, 2).eval(), (torch.ones(1, 2),), dtype=F16),
                      amp_compiler.ConvertedModel)  # fmt: skip
