"""Files that users ask for: whole or not at all, and nothing left beside them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from amp_compiler.common.errors import ArchiveError, ArgumentError
from amp_compiler.common.files import check_target, replacing, write_text


def test_a_file_is_written_and_nothing_else(tmp_path: Path) -> None:
    assert write_text(tmp_path / "a.txt", "grüß") == tmp_path / "a.txt"
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "grüß"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), ValueError("mine"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_the_old_file_and_no_scratch(tmp_path: Path, failure: BaseException) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    expected = ArchiveError if isinstance(failure, OSError) else type(failure)

    def write() -> None:
        with replacing(target, what="The model", error=ArchiveError) as scratch:
            scratch.write_text("half")
            raise failure

    with pytest.raises(expected) as caught:
        write()
    if expected is ArchiveError:
        assert str(caught.value) == f"The model could not be written to {target}: No space left on device."
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_further_files_move_along_before_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(Path(b).name), replace(a, b)))
    with replacing(tmp_path / "m.onnx") as scratch:
        scratch.write_text("graph")
        scratch.with_name("m.onnx.data").write_text("weights")
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert order == ["m.onnx.data", "m.onnx"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_permissions_are_those_of_any_new_file_or_of_the_one_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "new", "x")
    assert mode(tmp_path / "new") == mode(tmp_path / "plain")
    (tmp_path / "new").chmod(0o640)
    write_text(tmp_path / "new", "y")
    assert mode(tmp_path / "new") == 0o640


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "there" / "real.txt")
    write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "there" / "real.txt").read_text() == "new"
    assert os.listdir(tmp_path / "there") == ["real.txt"]


@pytest.mark.parametrize(
    ("path", "told", "hint"),
    [
        ("", "it is a folder", "pass the path of a file, such as m.pt2."),
        ("folder", "it is a folder", "pass the path of a file, such as m.pt2."),
        ("no/where.txt", "there is no folder", "create it first (mkdir -p "),
        ("pipe", "it is a device or a pipe", "pass the path of a file, such as m.pt2."),
    ],
)
def test_a_place_that_cannot_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, told: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match=f"cannot be written: {told}") as caught:
        check_target(path, example="m.pt2")
    assert caught.value.hint.startswith(hint)
    with pytest.raises(ArgumentError, match=told):
        write_text(path, "x")
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="File name too long"):
        write_text(tmp_path / ("x" * 300), "x")
    assert os.listdir(tmp_path) == []
