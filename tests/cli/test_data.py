"""Data that does not fit a model, and files that cannot be written: errors of ours, before any long work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import Result

from amp_compiler import Calibration, load_converted
from amp_compiler.cli import data

SOURCE = '''
import torch
from torch import nn

from faults import evaluations


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(torch.relu(self.embed(x))))


class Writes(Net):
    def forward(self, x):
        return super().forward(x.mul_(2.0))


class Breaks(Net):
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return super().forward(x)


def with_example():
    return Net(), (torch.ones(3, 4),)


def low():
    return Net().bfloat16()


def endless():
    while True:
        yield torch.ones(1, 4)


def fails_late():
    yield torch.ones(1, 4)
    raise OSError("the disk is gone")


def one():
    return {"x": torch.ones(3, 4)}


def three():
    return [(torch.ones(3, 4), torch.ones(3), torch.ones(3))]


def low_batches():
    return [torch.ones(3, 4, dtype=torch.bfloat16)]


def other_shape(model):
    return float(model(torch.ones(3, 5)).sum())


def distance(model):
    with torch.no_grad():
        return float((model(torch.ones(3, 4)) - model.original(torch.ones(3, 4))).abs().max())


def stops(model):
    evaluations.append(0)
    if len(evaluations) == 3:
        raise KeyboardInterrupt
    return distance(model)
'''
Run = Callable[..., Result]


@pytest.fixture
def here(user_folder: Path) -> Path:
    (user_folder / "faults.py").write_text("evaluations = []\n")
    (user_folder / "fits.py").write_text(SOURCE)
    np.savez(user_folder / "fits.npz", np.ones((3, 4), np.float32))
    np.savez(user_folder / "larger.npz", np.ones((5, 4), np.float32))
    np.savez(user_folder / "wrong.npz", np.ones((3, 5), np.float32))
    np.savez(user_folder / "misnamed.npz", y=np.ones((3, 4), np.float32))
    np.savez(user_folder / "nan.npz", np.full((3, 4), np.nan, np.float32))
    np.savez(user_folder / "empty.npz", np.ones((0, 4), np.float32))
    np.savez(user_folder / "words.npz", np.array(["a"]))
    np.savez(user_folder / "targets.npz", targets=np.ones(3))
    (user_folder / "empty.pt").write_bytes(b"")
    (user_folder / "notes.txt").write_text("not a journal\n")
    return user_folder


SHAPE = "batch 1: x is float32[3, 5], but float32[3, 4] in the example inputs. embed (Linear) expects float32[..., 4]"
SEARCH = ["search", "fits.py:with_example", "--tolerance", "0.1"]
CONVERT = ["convert", "fits.py:with_example", "--tolerance", "0.1", "-o", "x.pt2"]
WRONG: dict[str, tuple[list[str], str]] = {
    "calibrate, shape": (["calibrate", "fits.py:with_example", "--data", "wrong.npz"], SHAPE),
    "search, shape": ([*SEARCH, "--data", "wrong.npz"], SHAPE),
    "convert, shape": ([*CONVERT, "--data", "wrong.npz"], SHAPE),
    "input, shape": (["calibrate", "fits.py:Net", "-i", "3x5"], "batch 1: x is float32[3, 5]. embed (Linear) expects"),
    "name": ([*SEARCH, "--data", "misnamed.npz"], "it is Net.forward(x), and the batch gives y float32[3, 4]"),
    "another size": ([*CONVERT, "--data", "larger.npz"], "x is float32[5, 4], but float32[3, 4] in the example inputs"),
    "no export": (["convert", "fits.py:Breaks", *CONVERT[2:], "--data", "fits.npz"], "cannot be exported"),
    "NaN": ([*SEARCH, "--data", "nan.npz"], "In fp32, the outputs of the model for the data have NaN"),
    "no samples": ([*SEARCH, "--data", "empty.npz"], "for the data: x is float32[0, 4]"),
    "text": ([*SEARCH, "--data", "words.npz"], "uint8, and bool.\n"),
    "only targets": ([*SEARCH, "--data", "targets.npz"], "it has targets."),
    "an empty file": ([*SEARCH, "--data", "empty.pt"], "the file empty.pt is empty"),
    "three parts": ([*SEARCH, "--data", "fits.py:three"], "Batch 1 has 3 parts"),
    "fails late": ([*SEARCH, "--data", "fits.py:fails_late"], "batch 2 raised OSError: the disk is gone (at "),
    "a low model": (["search", "fits.py:low", "--tolerance", "1", "--data", "fits.py:low_batches"], "are bfloat16"),
    "no journal": ([*SEARCH, "--evaluate", "fits.py:distance", "--journal", "notes.txt"], "is not the journal of a"),
    "a read-only place": ([*SEARCH, "--data", "fits.npz", "-o", "/proc/p.toml"], "/proc/p.toml cannot be written"),
    "evaluate, shape": ([*SEARCH, "--evaluate", "fits.py:other_shape"], "fp32 model: RuntimeError: a and b must"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit(here: Path, run: Run, name: str) -> None:
    args, words = WRONG[name]
    done = run(*args)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert "inside amp-compiler" not in done.stderr
    assert not (here / "x.pt2").exists()


def test_all_batches_that_were_asked_for_are_run(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MOST_BATCHES", 3)
    done = run("calibrate", "fits.py:Net", "--data", "fits.py:endless", "--most", "5", "--json")
    assert Calibration.from_json(done.stdout).batches == 5
    done = run("calibrate", "fits.py:Net", "--data", "fits.py:endless")
    assert "Net, float16, 3 batches" in done.stdout
    assert "relu#0" in done.stdout, "two calls of an op in one module are told apart"
    assert "gives more than 3 batches: the first 3 are used" in done.stderr


def test_a_function_that_returns_one_batch(here: Path, run: Run) -> None:
    done = run("calibrate", "fits.py:Net", "--data", "fits.py:one", "--json")
    assert Calibration.from_json(done.stdout).batches == 1


def test_data_alone_is_enough_to_convert(here: Path, run: Run) -> None:
    done = run("convert", "fits.py:Net", "--tolerance", "0.01", "--data", "fits.npz", "-o", "alone.pt2", "-q")
    assert done.exit_code == 0, done.output
    assert load_converted(here / "alone.pt2")(torch.ones(3, 4)).shape == (3, 2)


def test_a_model_that_writes_to_its_input_is_compared_with_the_same_input(here: Path, run: Run) -> None:
    done = run("convert", "fits.py:Writes", "-i", "3x4", "--dtype", "float16", "-o", "writes.pt2", "--json")
    assert json.loads(done.stdout)["snr_db"] > 40


def test_a_search_that_is_stopped_says_how_to_continue(here: Path, run: Run) -> None:
    journal = here / "stopped.jsonl"
    args = ["search", "fits.py:Net", "--evaluate", "fits.py:stops", "--minimize", "--tolerance", "0.1"]
    done = run(*args, "--journal", journal)
    assert done.exit_code == 130
    assert f"every evaluation so far is in {journal}: the same command continues" in done.stderr
    done = run(*args, "--journal", journal)
    assert done.exit_code == 0, done.output
    assert "4 evaluations" in done.stdout


def test_an_error_that_is_maximized_is_noticed(here: Path, run: Run) -> None:
    done = run("search", "fits.py:Net", "--evaluate", "fits.py:distance", "--tolerance", "0.1")
    assert "pass maximize=False (--minimize) if it is an error" in done.stderr


def test_explain_takes_the_dtype_of_the_calibration(here: Path, run: Run) -> None:
    assert run("calibrate", "fits.py:Net", "--data", "fits.npz", "-o", "r.json", "-q").exit_code == 0
    done = run("explain", "fits.py:Net", "-i", "3x4", "--node", "linear", "--calibration", "r.json")
    assert done.stdout.splitlines()[0].split()[-1] == "float16"
