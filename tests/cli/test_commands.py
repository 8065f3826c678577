"""Every command as a user starts it, outside of the tests' process, and the examples of every help text."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from amp_compiler.cli import calibrate, convert, doctor, dump, explain, ops, passes, predict, search

COMMANDS = (dump, explain, ops, predict, calibrate, convert, search, passes, doctor)
EXAMPLES = [example for command in COMMANDS for example in command.EXAMPLES]
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


#: Each command as a user types it. They share one process that does what ``python -m amp_compiler`` does, because
#: starting Python with torch takes longer than most of them.
TYPED = {
    "explain": ["explain", "model.py:make", "--op", "softmax", "--graph", "forward", "--quiet"],
    "convert": ["convert", "model.py:make", "-o", "process.pt2", "--json", "--dtype", "float16"],
    "doctor": ["doctor", "--json"],
    "dump": ["dump", "model.py:make", "--level", "O1"],  # the last, because it logs, to the process's own stderr
}
PROCESS = """
import contextlib, io, json, os, runpy, sys
found = {}
for name, args in json.loads(sys.argv[1]).items():
    out, err, code = io.StringIO(), io.StringIO(), 0
    os.environ["AMP_LOGS"] = "passes,casts" if name == "dump" else ""
    sys.argv = ["amp-compiler", *args]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module("amp_compiler", run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
    found[name] = (code, out.getvalue(), err.getvalue())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def done(user_folder: Path) -> dict[str, Done]:
    ran = subprocess.run(
        [sys.executable, "-c", PROCESS, json.dumps(TYPED)], cwd=user_folder, capture_output=True, text=True, check=True
    )
    found = {name: Done(*values) for name, values in json.loads(ran.stdout).items()}
    return {**found, "dump": replace(found["dump"], stderr=found["dump"].stderr + ran.stderr)}


def test_dump_as_a_process(done: dict[str, Done]) -> None:
    dumped = done["dump"]
    assert dumped.returncode == 0, dumped.stderr
    assert "blocks.0.up  Linear" in dumped.stdout
    assert "level O1, bfloat16" in dumped.stdout
    assert "\x1b" not in dumped.stdout, "colour belongs on a terminal"
    assert "[amp passes] forward insert_casts:" in dumped.stderr
    assert "[amp casts] + " in dumped.stderr


def test_explain_as_a_process(done: dict[str, Done]) -> None:
    explained = done["explain"]
    assert (explained.returncode, explained.stderr) == (0, "")
    assert "the op table" in explained.stdout


def test_convert_as_a_process(done: dict[str, Done], user_folder: Path) -> None:
    converted = done["convert"]
    assert converted.returncode == 0, converted.stderr
    found = json.loads(converted.stdout)
    assert found["file_bytes"] == (user_folder / "process.pt2").stat().st_size
    assert found["stored_bytes"] < 0.6 * found["fp32_bytes"]
    assert found["snr_db"] > 30
    program = torch.export.load(user_folder / "process.pt2")
    assert program.state_dict["blocks.0.up.weight"].dtype is torch.float16


def test_doctor_as_a_process(done: dict[str, Done]) -> None:
    seen = done["doctor"]
    assert seen.returncode == 0, seen.stderr
    found = json.loads(seen.stdout)
    assert found["torch"] == torch.__version__
    assert [s["dtype"] for s in found["speeds"] if s["device"] == "cpu"] == ["float32", "float16", "bfloat16"]
    assert all(s["native"] > 0 and s["ours"] > 0 and s["of_fp32"] > 0 for s in found["speeds"])
    assert all(s["kernel"] in ("aten::mm", "amp::cast_matmul") for s in found["speeds"])


def test_passes_as_a_process_of_its_own(user_folder: Path) -> None:
    """``python -m amp_compiler``: the tests' own process may not have the script on its PATH."""
    command = [sys.executable, "-m", "amp_compiler", "passes"]
    ran = subprocess.run(command, cwd=user_folder, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.index("normalize") < ran.stdout.index("insert_casts") < ran.stdout.index("fold_casts")


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_help_texts_run(example: str, run: Callable[..., Result], user_folder: Path) -> None:
    program, *args = shlex.split(example)
    assert program == "amp-compiler"
    done = run(*args)
    assert done.exit_code == 0, done.output
    for flag in ("-o", "--onnx", "--plot"):
        if flag in args:
            assert (user_folder / args[args.index(flag) + 1]).stat().st_size > 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.NAME)
def test_help_shows_the_examples(command: object, run: Callable[..., Result]) -> None:
    name, examples = command.NAME, command.EXAMPLES  # type: ignore[attr-defined]
    shown = " ".join(run(name, "--help").output.split())
    assert all(example in shown for example in examples)


def test_the_script_of_the_package_is_this_application() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["amp-compiler"].partition(":")
    assert callable(getattr(import_module(module), name))


def test_the_version_and_completion(run: Callable[..., Result]) -> None:
    from amp_compiler import __version__

    assert run("--version").output.strip() == f"amp-compiler {__version__}"
    assert "--install-completion" in run("--help").output


def test_ops_tells_class_and_reason(run: Callable[..., Result]) -> None:
    done = run("ops", "softmax", "aten.gelu", "native_layer_norm_backward", "--json")
    rows = json.loads(done.stdout)
    assert [row["class"] for row in rows] == ["fp32", "follow", "fp32"]
    assert rows[0]["fp32_inside"]
    assert "overflows" in rows[0]["reason"]
    text = run("ops", "--quiet").stdout
    assert {"linear", "exp", "relu", "LOW", "FP32", "EXACT"} <= set(text.split())
    wrong = run("ops", "sofmax")
    assert wrong.exit_code == 2
    assert "Did you mean 'softmax'" in wrong.output
    assert json.loads(run("ops", "bernoulli", "--json").stdout)[0]["class"] == "keep"
