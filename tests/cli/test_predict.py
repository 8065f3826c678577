"""``amp-compiler predict``, and what ``doctor`` says of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from amp_compiler.cost import machine

Run = Callable[..., Result]
FIGURES = {"fp32": 1e11, "fp16": 1e11, "bf16": 2e11}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is measured at once."""
    monkeypatch.setenv("AMP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine, "measure", lambda native=False: machine.Figures(machine._key(), FIGURES, 5e10, 2e-6))


def test_a_table_for_devices_and_levels(run: Run) -> None:
    done = run("predict", "model.py:make", "--device", "a100_80,t4", "--levels", "O2,O3", "--inference", "--quiet")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    rows = [line.split()[:2] for line in lines[1:5]]
    assert rows == [[device, level] for device in ("a100_80", "t4") for level in ("O2", "O3")]
    assert "it will not pay" in done.output
    assert "because" in done.output
    assert "It does not at 64 times the batch of 8 either." in done.output


def test_json_and_a_file(run: Run, user_folder: Path) -> None:
    done = run("predict", "model.py:make", "--device", "v100_sxm2", "--inference", "--json", "-o", "told.json")
    assert done.exit_code == 0, done.output
    (told,) = json.loads((user_folder / "told.json").read_text())
    assert told["device"] == "v100_sxm2"
    assert told["level"] == "O2"
    assert told["seconds"] == pytest.approx(sum(told["breakdown"].values()))


@pytest.mark.parametrize(("args", "told"), [
    (("--device", "a100_90"), "Unknown device 'a100_90'. Did you mean 'a100_80'"),
    (("--device", ","), "--device needs a name"),
    (("--device", "t4", "--levels", "O2,O5"), "O5"),
    (("--device", "t4", "--optimizer", "lion"), "Unknown optimizer 'lion'"),
    (("--device", "none.toml"), "none.toml cannot be read"),
])  # fmt: skip
def test_a_wrong_request_is_one_line(run: Run, args: tuple[str, ...], told: str) -> None:
    done = run("predict", "model.py:make", *args)
    assert done.exit_code == 2, done.output
    assert told in done.output
    assert "Traceback" not in done.output


def test_the_doctor_predicts_for_this_machine(run: Run, measured: None) -> None:
    done = run("doctor", "model.py:make", "--quiet")
    assert done.exit_code == 0, done.output
    assert "measured      100 GFLOP/s fp32, 50 GB/s, 2.0 µs for an op" in done.output
    assert "Predicted: this_machine: " in done.output


def test_the_doctor_goes_on_without_a_prediction(run: Run, measured: None) -> None:
    done = run("doctor", "model.py:breaks", "--quiet")
    assert done.exit_code == 0, done.output
    assert "No prediction: " in done.output
