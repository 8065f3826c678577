"""Every command as a user starts it, in a process of its own, and the examples of every help text."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from amp_compiler.cli import convert, doctor, dump, explain, passes

COMMANDS = (dump, explain, convert, passes, doctor)
EXAMPLES = [example for command in COMMANDS for example in command.EXAMPLES]
ROOT = Path(__file__).parents[2]


def start(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m amp_compiler``: the tests' own process may not have the script on its PATH."""
    return subprocess.run(
        [sys.executable, "-m", "amp_compiler", *args], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_dump_as_a_process(user_folder: Path) -> None:
    done = start(user_folder, "dump", "model.py:make", "--level", "O1", AMP_LOGS="passes,casts")
    assert done.returncode == 0, done.stderr
    assert "blocks.0.up  Linear" in done.stdout
    assert "level O1, bfloat16" in done.stdout
    assert "\x1b" not in done.stdout, "colour belongs on a terminal"
    assert "[amp passes] forward insert_casts:" in done.stderr
    assert "[amp casts] + " in done.stderr


def test_explain_as_a_process(user_folder: Path) -> None:
    done = start(user_folder, "explain", "model.py:make", "--op", "softmax", "--graph", "forward", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the op table" in done.stdout


def test_convert_as_a_process(user_folder: Path) -> None:
    done = start(user_folder, "convert", "model.py:make", "-o", "process.pt2", "--json", "--dtype", "float16")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["file_bytes"] == (user_folder / "process.pt2").stat().st_size
    assert found["stored_bytes"] < 0.6 * found["fp32_bytes"]
    assert found["snr_db"] > 30
    program = torch.export.load(user_folder / "process.pt2")
    assert program.state_dict["blocks.0.up.weight"].dtype is torch.float16


def test_passes_as_a_process(user_folder: Path) -> None:
    done = start(user_folder, "passes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.index("normalize") < done.stdout.index("insert_casts") < done.stdout.index("fold_casts")


def test_doctor_as_a_process(user_folder: Path) -> None:
    done = start(user_folder, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["torch"] == torch.__version__
    assert [s["dtype"] for s in found["speeds"] if s["device"] == "cpu"] == ["float32", "float16", "bfloat16"]
    assert all(s["native"] > 0 and s["ours"] > 0 for s in found["speeds"])


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_help_texts_run(example: str, run: Callable[..., Result], user_folder: Path) -> None:
    program, *args = shlex.split(example)
    assert program == "amp-compiler"
    done = run(*args)
    assert done.exit_code == 0, done.output
    for flag in ("-o", "--onnx"):
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
