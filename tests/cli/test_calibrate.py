"""``amp-compiler calibrate``, its data, and ``explain`` with a calibration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from typer.testing import Result

from amp_compiler import Calibration, Policy

SOURCE = '''
import torch
from torch import nn


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(torch.relu(self.fc(x)))


def large():
    torch.manual_seed(0)
    model = Large()
    model.fc.weight.data.mul_(1e6)
    return model


def loss(output, targets):
    return (output - targets).square().mean()


def batches():
    return ((torch.full((2, 4), float(n)), torch.zeros(2, 1)) for n in range(1, 4))
'''
Run = Callable[..., Result]
LARGE = ("large.py:large", "--data", "large.py:batches", "--loss", "large.py:loss")


@pytest.fixture
def here(user_folder: Path) -> Path:
    (user_folder / "large.py").write_text(SOURCE)
    return user_folder


def test_writes_ranges_and_a_policy(here: Path, run: Run) -> None:
    done = run("calibrate", *LARGE, "-o", "ranges.json", "--policy", "policy.toml")
    assert done.exit_code == 0, done.output
    found = Calibration.load(here / "ranges.json")
    assert (found.batches, found.has_gradients, found.model) == (3, True, "Large")
    policy = Policy.from_file(here / "policy.toml")
    assert {rule.module for rule in policy.calls if rule.precision == "float32"} >= {"fc", "out"}
    assert done.stdout.splitlines()[0] == f"Large, float16, 3 batches, with a loss, scale {found.scale:g}"
    explained = run("explain", "large.py:large", "--input", "2x4", "--node", "linear", "--calibration", "ranges.json")
    assert "(batch 3), in 3 batches; in float16" in " ".join(explained.stdout.split())
    assert "overflow" in explained.stdout
    options = ("--node", "linear", "--calibration", "ranges.json", "--json")
    as_json = run("explain", "large.py:large", "-i", "2x4", *options)
    assert len(json.loads(as_json.stdout)[0]["measured"]) == 4


def npz(path: Path) -> None:
    numpy.savez(path, numpy.ones((6, 4)), targets=numpy.zeros((6, 1), dtype=numpy.float32))


def npz_by_name(path: Path) -> None:
    numpy.savez(path, x=numpy.ones((6, 4), dtype=numpy.float32), targets=numpy.zeros((6, 1)))


def pt(path: Path) -> None:
    torch.save((torch.ones(6, 4), torch.zeros(6, 1)), path)


@pytest.mark.parametrize(("name", "write"), [("a.npz", npz), ("b.npz", npz_by_name), ("c.pt", pt)])
def test_data_of_files(here: Path, run: Run, name: str, write: Callable[[Path], None]) -> None:
    write(here / name)
    done = run("calibrate", "large.py:large", "--data", name, "--loss", "large.py:loss", "--batch-size", "4", "--json")
    assert done.exit_code == 0, done.output
    found = Calibration.from_json(done.stdout)
    assert found.batches == 2
    (row,) = [r for r in found.rows if r.module == "fc"]
    assert row.result.elements == 6 * 8


def test_a_list_of_batches_and_most(here: Path, run: Run) -> None:
    torch.save([(torch.ones(2, 4), torch.zeros(2, 1))] * 5, here / "many.pt")
    done = run("calibrate", "large.py:large", "--data", "many.pt", "--loss", "large.py:loss", "--most", "3", "--json")
    assert Calibration.from_json(done.stdout).batches == 3


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


BAD: dict[str, tuple[list[str], str]] = {
    "no file": (["--data", "none.pt"], "there is no file none.pt"),
    "no form": (["--data", "numbers"], "give a .npz file"),
    "damaged": (["--data", "damaged.pt"], "cannot be read"),
    "damaged arrays": (["--data", "damaged.npz"], "is not an .npz file of plain arrays"),
    "code": (["--data", "code.pt"], "cannot be read as tensors (weights_only)"),
    "no batches": (["--data", "large.py:large"], "which is not a list of batches"),
    "an empty list": (["--data", "empty.pt"], "gives no batch"),
    "a folder": (["--data", "large.py:batches", "-o", "none/ranges.json"], "there is no folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data(here: Path, run: Run, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "damaged.pt").write_bytes(b"PK\x03\x04 nothing")
    (here / "damaged.npz").write_bytes(b"PK\x03\x04 nothing")
    torch.save(_Evil(), here / "code.pt")
    torch.save([], here / "empty.pt")
    options, message = BAD[name]
    done = run("calibrate", "large.py:large", "--loss", "large.py:loss", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "executed" not in capfd.readouterr().out


def test_a_calibration_of_another_model(here: Path, run: Run) -> None:
    run("calibrate", *LARGE, "-o", "ranges.json", "-q")
    done = run("explain", "model.py:make", "--op", "softmax", "--calibration", "ranges.json")
    assert done.exit_code == 2
    assert "ranges.json is the calibration of another model (Large)" in done.stderr
