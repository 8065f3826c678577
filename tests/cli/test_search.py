"""``amp-compiler search``, ``convert --tolerance``, and --data."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from amp_compiler import ArgumentError, Policy, load_converted
from amp_compiler.cli.data import load_batches

FAULTY = '''
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
        self.large = nn.Parameter(torch.full((16,), 1e6))

    def forward(self, x):
        return self.b(torch.addcdiv(self.a(x), self.large, self.large))


def make():
    return Net(), (torch.ones(8, 16),)
'''


@pytest.fixture
def faulty(user_folder):
    (user_folder / "faulty.py").write_text(FAULTY)
    data = np.random.default_rng(0).standard_normal((8, 16), dtype=np.float32)
    np.savez(user_folder / "data.npz", data)
    return user_folder


def test_a_search_on_data(run, faulty):
    done = run("search", "faulty.py:make", "--data", "data.npz", "--tolerance", "0.01", "-o", "found.toml",
               "--plot", "found.svg", "--objective", "t4", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["objective"] == "t4"
    assert list(found["fp32"]) == [":addcdiv#0"]
    assert found["metric"] <= 0.01
    assert Policy.from_file(faulty / "found.toml").call_rule("", "addcdiv", 0).precision == "float32"
    assert "<svg" in (faulty / "found.svg").read_text()


def test_a_conversion_that_is_right_by_measurement(run, faulty):
    done = run("convert", "faulty.py:make", "--data", "data.npz", "--tolerance", "0.01", "-o", "right.pt2",
               "--onnx", "right.onnx", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["data_error"] <= 0.01
    assert found["dtype"] == "float16"
    assert found["low_flops_share"] == 1.0
    x = torch.ones(8, 16)
    assert torch.isfinite(load_converted(faulty / "right.pt2")(x)).all()


@pytest.mark.parametrize(("args", "words"), [
    (["search", "faulty.py:make", "--tolerance", "1"], "There is no metric"),
    (["search", "faulty.py:make", "--tolerance", "1", "--data", "none.npz"], "no file none.npz"),
    (["search", "faulty.py:make", "--tolerance", "1", "--evaluate", "model.py:number"], "is a int"),
    (["search", "faulty.py:make", "--tolerance", "1", "--evaluate", "model.py:eror"], "no attribute 'eror'"),
    (["search", "faulty.py:make", "--tolerance", "1", "--evaluate", "model.py"], "does not name anything"),
    (["search", "faulty.py:make", "--tolerance", "1", "--data", "wrong.npz"], "with batch 1: x is float32[2, 3]"),
    (["search", "faulty.py:make", "--tolerance", "1", "--data", "data.npz", "--objective", "speed"], "or a device"),
    (["convert", "faulty.py:make", "--tolerance", "1", "-o", "x.pt2"], "--tolerance needs --data"),
    (["convert", "faulty.py:make", "--data", "data.npz", "-o", "x.pt2"], "--data needs --tolerance"),
    (["convert", "faulty.py:make", "--tolerance", "1", "--data", "data.npz", "--fp32", "add", "-o", "x.pt2"], "omit"),
])  # fmt: skip
def test_wrong_requests(run, faulty, args, words):
    np.savez(faulty / "wrong.npz", np.ones((2, 3), np.float32))
    done = run(*args)
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert not (faulty / "x.pt2").exists()


def test_data_from_every_source(tmp_path):
    x, y = torch.ones(2, 3), torch.zeros(2)
    np.savez(tmp_path / "place.npz", x.numpy(), y.numpy(), targets=y.numpy())
    (args, targets), = load_batches(str(tmp_path / "place.npz"))
    assert [a.shape for a in args] == [x.shape, y.shape]
    assert torch.equal(targets, y)
    np.savez(tmp_path / "name.npz", mask=y.numpy(), x=x.numpy())
    (kwargs, targets), = load_batches(str(tmp_path / "name.npz"))
    assert (set(kwargs), targets) == ({"mask", "x"}, None)
    torch.save(x, tmp_path / "one.pt")
    torch.save([(x, y), (x, y)], tmp_path / "two.pt")
    assert [len(load_batches(str(tmp_path / name))) for name in ("one.pt", "two.pt")] == [1, 2]
    (tmp_path / "source.py").write_text(
        "import itertools, torch\ndef endless():\n    return (torch.ones(2) for _ in itertools.count())\n"
        "def empty():\n    return []\ndef text():\n    return 'x'\ndef fails():\n    raise OSError('gone')\n"
    )
    assert len(load_batches(f"{tmp_path}/source.py:endless")) == 128


@pytest.mark.parametrize(("name", "words"), [
    ("damaged.npz", "not an .npz"), ("damaged.pt", "cannot be read"), ("objects.npz", "not an .npz"),
    ("code.pt", "weights_only"), ("mixed.npz", "must name its arrays"), ("x.csv", "a .npz file"),
    ("source.py:empty", "no batch"), ("source.py:text", "not a list"), ("source.py:fails", "OSError: gone"),
])  # fmt: skip
def test_bad_data(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 and then nothing")
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04 and then nothing")
    np.savez(tmp_path / "objects.npz", np.array([{}, 1], dtype=object))
    torch.save(torch.nn.Linear(2, 2), tmp_path / "code.pt")
    np.savez(tmp_path / "mixed.npz", np.ones(2), mask=np.ones(2))
    (tmp_path / "source.py").write_text(
        "def empty():\n    return []\ndef text():\n    return 'x'\ndef fails():\n    raise OSError('gone')\n"
    )
    with pytest.raises(ArgumentError, match=words):
        load_batches(name)
