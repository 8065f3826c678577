"""Two results beside each other: nothing is found in itself, and what changed is found."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compare import Finding, compare, differing, main, warnings
from harness import Result, Row

MACHINE = {"cpu": "a", "cores": "2", "threads": "2", "torch": "2.13.0", "load": "0.1", "commit": "x"}
FEW = settings(max_examples=25)
TIMES = st.lists(st.floats(0.5, 2.0), min_size=9, max_size=9)


def result(rows: list[Row]) -> Result:
    return Result("steps", "2026-11-16", dict(MACHINE), {"rounds": 9}, rows)


@st.composite
def results(draw: st.DrawFn) -> Result:
    """A subject or two, each with fp32, and two variants divided by it."""
    rows = []
    for subject in draw(st.sampled_from([["bert"], ["bert", "nine"]])):
        key = {"subject": subject, "variant": "fp32"}
        for variant in ("fp32", "O2", "autocast"):
            counts = draw(st.dictionaries(st.sampled_from(["ops", "casts", "peak_bytes"]), st.integers(0, 10**9)))
            reference = None if variant == "fp32" else dict(key)
            rows.append(Row({**key, "variant": variant}, counts, {"seconds": draw(TIMES)}, reference=reference))
    return result(rows)


@FEW
@given(results())
def test_a_result_differs_in_nothing_from_itself(found: Result) -> None:
    assert compare(found, copy.deepcopy(found)) == []


@FEW
@given(found=results(), factor=st.floats(20.0, 100.0), number=st.integers(1, 2))
def test_a_slower_variant_is_found_and_turned_around_is_faster(found: Result, factor: float, number: int) -> None:
    changed = copy.deepcopy(found)
    row = changed.rows[number]
    row.samples["seconds"] = [factor * sample for sample in row.samples["seconds"]]
    (there,), (back,) = compare(found, changed), compare(changed, found)
    assert (there.verdict, there.worse, back.verdict, back.worse) == ("slower", True, "faster", False)
    assert row.key["variant"] in there.where


@FEW
@given(found=results(), factor=st.floats(0.01, 100.0))
def test_a_machine_that_is_slower_in_everything_is_not(found: Result, factor: float) -> None:
    changed = copy.deepcopy(found)
    for row in changed.rows:
        row.samples["seconds"] = [factor * sample for sample in row.samples["seconds"]]
    # fp32 is the reference and has only its own seconds
    assert {f.where.split()[-1] for f in compare(found, changed)} <= {"fp32"}


@FEW
@given(found=results(), change=st.sampled_from([-1, 1]), data=st.data())
def test_a_count_changed_by_one_is_found(found: Result, change: int, data: st.DataObject) -> None:
    changed = copy.deepcopy(found)
    row = data.draw(st.sampled_from(changed.rows))
    name = data.draw(st.sampled_from(["ops", "casts"]))
    row.counts[name] = 5
    next(r for r in found.rows if r.key == row.key).counts[name] = 5 - change
    (difference,) = compare(found, changed)
    assert (difference.verdict, difference.what, difference.new) == ("more" if change > 0 else "less", name, "5")
    assert difference.old == str(5 - change)
    assert difference.worse == (change > 0)


@FEW
@given(found=results(), data=st.data())
def test_rows_that_are_new_or_gone(found: Result, data: st.DataObject) -> None:
    changed = copy.deepcopy(found)
    row = data.draw(st.sampled_from([r for r in changed.rows if r.key["variant"] != "fp32"]))
    changed.rows.remove(row)
    (there,), (back,) = compare(found, changed), compare(changed, found)
    assert (there.verdict, back.verdict) == ("gone", "new")
    assert there.worse  # it was asked for
    assert not back.worse
    changed.arguments["subjects"] = "fewer"
    assert not any(finding.worse for finding in compare(found, changed))


def test_times_that_are_no_longer_there_are_missed() -> None:
    old = result([Row({"variant": "O2"}, samples={"seconds": [1.0] * 9})])
    for samples in ({}, {"seconds": []}):
        (finding,) = compare(old, result([Row({"variant": "O2"}, samples=samples)]))
        assert (finding.verdict, finding.what, finding.worse) == ("gone", "seconds", True)


def test_few_rounds_are_shown_and_not_judged() -> None:
    old, new = (result([Row({"variant": "O2"}, samples={"seconds": [s] * 4})]) for s in (1.0, 2.0))
    (finding,) = compare(old, new)
    assert (finding.verdict, finding.worse) == ("slower", False)


def test_more_low_work_is_worse_only_if_there_is_more_in_all() -> None:
    old = result([Row({"variant": "O2"}, {"flops_low": 10, "flops_fp32": 90})])
    moved = result([Row({"variant": "O2"}, {"flops_low": 60, "flops_fp32": 40})])
    added = result([Row({"variant": "O2"}, {"flops_low": 20, "flops_fp32": 90})])
    assert not any(f.worse for f in compare(old, moved))
    assert [f.what for f in compare(old, added) if f.worse] == ["flops_low"]
    assert [f.what for f in compare(moved, old) if f.worse] == ["flops_fp32"]


def test_a_failure_is_worse_and_its_end_is_not() -> None:
    fine, broken = result([Row({"variant": "O2"})]), result([Row({"variant": "O2"}, note="why", failed=True)])
    assert compare(fine, broken) == [Finding("failed", "steps O2", "", "ran", "why")]
    assert compare(fine, broken)[0].worse
    assert not compare(broken, fine)[0].worse


def test_other_machines_are_named_and_their_times_not_judged() -> None:
    old = result([Row({"variant": "O2"}, {"ops": 1}, {"seconds": [1.0] * 9})])
    new = result([Row({"variant": "O2"}, {"ops": 2}, {"seconds": [9.0] * 9})])
    new.machine |= {"cpu": "b", "load": "9", "commit": "y"}
    assert [(f.verdict, f.worse) for f in compare(old, new)] == [("slower", False), ("more", True)]
    (line,) = warnings("steps", old, new)
    assert "cpu a → b" in line
    assert "times are not comparable, counts are" in line
    new.machine["torch"] = "2.14.0"
    new.arguments["rounds"] = 3
    assert len(warnings("steps", old, new)) == 3
    assert differing(old, old, list(MACHINE)) == []


# --------------------------------------------------------------------------------------------- the command


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    rows = [Row({"variant": "fp32"}, {"ops": 7}, {"seconds": [1.0] * 9})]
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run_quick.json").write_text("{}")  # no result
        result(rows).write(tmp_path / name / "steps.json")
    return tmp_path / "old", tmp_path / "new"


def test_the_command_on_folders_and_files(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    old, new = folders
    changed = result([Row({"variant": "fp32"}, {"ops": 8}, {"seconds": [2.0] * 9})])
    changed.write(new / "steps.json")
    changed.write(new / "casts.json")
    assert main([str(old), str(new)]) == 1
    said = capsys.readouterr().out
    assert "Slower:\n  steps fp32 seconds: 1,000.0 (1,000.0 to 1,000.0) ms → 2,000.0" in said
    assert "Counts more:\n  steps fp32 ops: 7 → 8" in said
    assert "New:\n  file casts.json" in said
    assert "2 worse of 3 differences." in said
    assert main([str(old), str(new), "--json"]) == 1
    machine = json.loads(capsys.readouterr().out)
    assert (machine["worse"], len(machine["findings"])) == (2, 3)


def test_the_command_on_the_same_and_on_nothing(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = folders
    fine, bad = old / "steps.json", old / "bad.json"
    assert main([str(fine), str(fine)]) == 0
    assert capsys.readouterr().out == "No differences.\n"
    bad.write_text("{")
    for first, second, said in (
        (old / "none.json", fine, "no such file"),
        (old, fine, "two files or two folders"),
        (bad, fine, "no result of a benchmark"),
    ):
        assert main([str(first), str(second)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
