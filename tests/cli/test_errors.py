"""A wrong request is one clear line and exit code 2; a failure of ours is exit code 1."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from amp_compiler import convert_model

WRONG = {
    "no module": (["dump", "nowhere.at_all:model"], "nowhere.at_all cannot be imported: ModuleNotFoundError"),
    "no file": (["dump", "missing.py:model"], "There is no file missing.py"),
    "broken file": (["dump", "broken.py:model"], "ValueError: half written (at "),
    "no attribute": (["dump", "model.py:nothing"], "model.py has no attribute 'nothing'. It has Block, Net"),
    "no attribute named": (["dump", "model.py"], "not a torch.export archive"),
    "neither": (["dump", "something"], "does not name a model: write package.module:attr"),
    "no model": (["dump", "model.py:number"], "is a int: a module, a class or a function"),
    "arguments": (["dump", "model.py:needs"], "needs arguments (width)"),
    "a factory that fails": (["dump", "model.py:fails"], "RuntimeError: no weights here"),
    "no inputs": (["dump", "model.py:plain"], "needs example inputs: add --input"),
    "wrong input": (["dump", "model.py:plain", "-i", "2x5"], "cannot be called with these inputs: RuntimeError: "),
    "too many": (["dump", "model.py:plain", "-i", "2x16", "-i", "2"], "cannot be called with these inputs: TypeError"),
    "bad shape": (["dump", "model.py:plain", "-i", "2xq"], "is not SHAPE[:DTYPE[:BELOW]]"),
    "bad dtype": (["dump", "model.py:plain", "-i", "2x16:float31"], "unknown dtype 'float31'"),
    "bad level": (["dump", "model.py:make", "--level", "o2"], "Did you mean 'O2'?"),
    "bad format": (["dump", "model.py:make", "--format", "pdf"], "choose one of text, python, json"),
    "bad graph": (["dump", "model.py:make", "--graph", "back"], "choose one of forward, inference, joint"),
    "bad pass": (["dump", "model.py:make", "--after", "fold"], "There is no stage 'fold'"),
    "bad module": (["dump", "model.py:make", "--module", "block.0"], "Did you mean 'blocks.0'?"),
    "bad device": (["dump", "model.py:make", "--level", "auto", "--device", "a100_8"], "Did you mean 'a100_80'"),
    "a device and a level": (["dump", "model.py:make", "--device", "t4"], "has no effect with level 'O2'"),
    "bad op": (["dump", "model.py:make", "--fp32", "softmx"], "softmax"),
    "no policy": (["dump", "model.py:make", "--policy", "no.toml"], "cannot be read"),
    "a difference as a picture": (["dump", "model.py:make", "--diff", "-f", "dot"], "A difference is text or json"),
    "a folder that is not there": (["dump", "model.py:make", "-o", "no/where.txt"], "cannot be written"),
    "nothing to explain": (["explain", "model.py:make"], "add --node NAME, --op OP or --module PATTERN"),
    "no such node": (["explain", "model.py:make", "--node", "linea"], "Did you mean 'linear"),
    "no such op": (["explain", "model.py:make", "--op", "conv2d"], "The graph has no op 'conv2d'; it has add"),
    "an op nearly": (["explain", "model.py:make", "--op", "softmx"], "Did you mean 'softmax'?"),
    "a module nearly": (["explain", "model.py:make", "--module", "blocks0.*"], "Did you mean 'blocks.0'?"),
    "two formats": (["dump", "model.py:make", "--json", "-f", "html"], "--json and --format html contradict"),
    "two formats, one the default": (["dump", "model.py:make", "--json", "-f", "text"], "pass only one of them"),
    "a summary as a picture": (["dump", "model.py:make", "--summary", "-f", "svg"], "--summary is the report of the"),
    "where to": (["convert", "model.py:make"], "There is no output file"),
    "no folder": (["convert", "model.py:make", "-o", "no/where.pt2"], "there is no folder"),
    "inputs of a file": (["dump", "any.pt2", "-i", "2"], "omit --input"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_one_line(name: str, run: Callable[..., Result]) -> None:
    args, message = WRONG[name]
    done = run(*args)
    assert done.exit_code == 2, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("amp-compiler: error: ")
    assert message in lines[0]
    assert done.stdout == ""


def test_debug_shows_where(run: Callable[..., Result]) -> None:
    assert "Traceback" in run("dump", "model.py:fails", "--debug").stderr


def test_a_failure_of_ours_is_exit_code_1(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    from amp_compiler import inspection

    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError("oh")

    monkeypatch.setattr(inspection, "inspect_model", broken)
    done = run("dump", "model.py:make")
    assert done.exit_code == 1
    assert "KeyError" in done.stderr
    assert "--debug shows where" in done.stderr


def bad_files(folder: Path) -> dict[str, str]:
    """Files that are no program, or one that would run code; name -> what the message says."""
    (folder / "text.pt2").write_text("not an archive")
    (folder / "empty.pt2").write_bytes(b"")
    with zipfile.ZipFile(folder / "zip.pt2", "w") as archive:
        archive.writestr("hello.txt", "hello")
    program = torch.export.export(torch.nn.Linear(4, 2), (torch.ones(1, 4),))
    torch.export.save(program, folder / "whole.pt2")
    data = (folder / "whole.pt2").read_bytes()
    (folder / "cut.pt2").write_bytes(data[: len(data) // 2])
    with zipfile.ZipFile(folder / "whole.pt2") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / "evil.pt2", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content.replace(b"torch.ops.aten.linear.default", b"torch.os.system"))
    return {
        "text": "not a torch.export archive", "empty": "not a torch.export archive", "zip": "zip.pt2",
        "cut": "truncated", "evil": "evil.pt2 is refused",
    }  # fmt: skip


def test_files_that_are_no_program(run: Callable[..., Result], user_folder: Path) -> None:
    for name, message in bad_files(user_folder).items():
        done = run("dump", f"{name}.pt2")
        assert done.exit_code == 2, (name, done.output)
        assert message in done.stderr, (name, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1
    assert run("dump", "whole.pt2", "-q").exit_code == 0
    done = run("dump", "model.py")
    assert done.exit_code == 2
    assert "write model.py:name" in done.stderr


def test_a_converted_model_keeps_its_policy(run: Callable[..., Result], user_folder: Path) -> None:
    model = torch.nn.Linear(4, 2).eval()
    convert_model(model, (torch.ones(1, 4),), dtype="float16").save(user_folder / "low.pt2")
    assert run("dump", "low.pt2", "-q").exit_code == 0
    assert run("dump", "low.pt2", "-q", "-d", "float16").exit_code == 0
    for option in (["--level", "O1"], ["--dtype", "bfloat16"], ["--fp32", "linear"]):
        done = run("dump", "low.pt2", *option)
        assert done.exit_code == 2
        assert "contains its policy (O2, float16)" in done.stderr


def test_export_that_fails_is_one_line(run: Callable[..., Result], user_folder: Path) -> None:
    (user_folder / "asks.py").write_text(
        "import torch\n\nclass Asks(torch.nn.Module):\n    def forward(self, x):\n"
        "        return x * 2 if x.sum().item() > 0 else x\n"
    )
    done = run("convert", "asks.py:Asks", "-i", "2x4", "-o", "out.pt2")
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "asks.py:5 in forward" in done.stderr
    assert not (user_folder / "out.pt2").exists()


def test_a_file_is_written_whole_or_not_at_all(
    run: Callable[..., Result], user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    target = user_folder / "kept.json"
    target.write_text("old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    done = run("dump", "model.py:make", "--format", "json", "-o", target)
    assert done.exit_code == 2
    assert "No space left" in done.stderr
    assert target.read_text() == "old"
    assert not list(user_folder.glob(".kept*"))
