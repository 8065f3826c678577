"""Result files: what is written is what is read, and a damaged file is one line."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import BadResult, Row, Run, arguments, read

NAMES = st.text("abc_", min_size=1, max_size=4)
ROWS = st.builds(
    Row,
    key=st.dictionaries(NAMES, st.text(max_size=5) | st.integers(), min_size=1, max_size=3),
    counts=st.dictionaries(NAMES, st.integers(0, 10**15), max_size=3),
    samples=st.dictionaries(NAMES, st.lists(st.floats(1e-9, 1e4), max_size=4), max_size=2),
    figures=st.dictionaries(NAMES, st.floats(-1e9, 1e9), max_size=2),
    reference=st.none() | st.dictionaries(NAMES, st.text(max_size=5), max_size=2),
    note=st.text(max_size=9),
    failed=st.booleans(),
)


def run_in(folder: Path, *options: str) -> Run:
    parsed = arguments(argparse.ArgumentParser()).parse_args(["--out", str(folder), "--threads", "1", *options])
    return Run("script", "a title", parsed)


@settings(max_examples=25)
@given(rows=st.lists(ROWS, max_size=4))
def test_rows_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    folder = tmp_path_factory.mktemp("out")
    run = run_in(folder)
    run.rows = rows
    assert run.finish() == (1 if any(row.failed for row in rows) else 0)
    found = read(folder / "script.json")
    assert found.rows == rows
    assert (found.script, found.machine, found.date) == ("script", run.machine, run.date)
    assert found.arguments == {"rounds": 9, "threads": 1}
    assert {"cpu", "cores", "threads", "torch", "python", "commit"} <= set(found.machine)


def test_the_table_for_spreadsheets(tmp_path: Path) -> None:
    run = run_in(tmp_path, "--name", "other")
    run.add(Row({"variant": "O2"}, {"ops": 3}, {"seconds": [3.0, 1.0, 2.0]}, {"exponent": 1.1}))
    run.add(Row({"variant": "O3"}, note="why", failed=True))
    drawn: list[Path] = []
    assert run.finish(drawn.append) == 1
    assert drawn == [tmp_path / "other.svg"]
    with open(tmp_path / "other.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert first == {
        "variant": "O2", "ops": "3", "seconds": "2.0", "seconds_min": "1.0", "seconds_max": "3.0", "exponent": "1.1",
        "note": "", "failed": "False",
    }  # fmt: skip
    assert (second["variant"], second["ops"], second["note"], second["failed"]) == ("O3", "", "why", "True")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no result"),
        ("[1, 2]", "holds a list"),
        ("{}", "has no 'rows'"),
        ('{"rows": []}', "no result"),
        ('{"rows": [{"no": 1}]}', "no result"),
        ('{"rows": 7}', "no result"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(BadResult, match=said) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("row", [{"counts": {"ops": 1.5}}, {"samples": {"seconds": [-1.0]}}, {"samples": {"s": ["x"]}}])
def test_rows_of_other_types_are_refused(tmp_path: Path, row: dict[str, object]) -> None:
    run_in(tmp_path).finish()
    path = tmp_path / "script.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "rows": [{"key": {"a": 1}, **row}]}))
    with pytest.raises(BadResult, match="no result"):
        read(path)


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--threads", "-1"], ["--rounds", "many"]])
def test_options_that_make_no_sense(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(argparse.ArgumentParser()).parse_args(options)
    assert options[0] in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, name in ((tmp_path / "file", None), (tmp_path, "a/b")):
        with pytest.raises(SystemExit, match=r"x\.py: results cannot be written to"):
            Run("x", "X", argparse.Namespace(threads=1, out=out, name=name))


def test_a_name_may_have_a_dot(tmp_path: Path) -> None:
    made = Run("x", "X", argparse.Namespace(threads=1, out=tmp_path, name="v1.2"))
    made.add(Row({"variant": "O2"}))
    assert made.finish() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1.2.csv", "v1.2.json"]
