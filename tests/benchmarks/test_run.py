"""The plans of run.py: every command parses, and a failure stops nothing."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from benchmark_helpers import FOLDER, load

run = load("run")
JOBS = [(plan, job) for plan, found in run.PLANS.items() for job in found.jobs]


@pytest.mark.parametrize(("plan", "job"), JOBS, ids=lambda value: getattr(value, "name", value))
def test_every_job_parses(plan: str, job: object, capsys: pytest.CaptureFixture[str]) -> None:
    words = job.command(Path("out"))
    assert words[:2] == [sys.executable, str(FOLDER / f"{job.script}.py")]
    try:
        found = load(job.script).parser().parse_args(words[2:])
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    assert (found.out, found.name) == (Path("out"), job.name)


@pytest.mark.parametrize("plan", run.PLANS)
def test_no_job_overwrites_another(plan: str) -> None:
    names = [job.name for job in run.PLANS[plan].jobs]
    assert len(set(names)) == len(names)
    assert not any(name.startswith("run_") for name in names)  # run_PLAN.json


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two scripts: the first fails, the second writes down what it was given."""
    (tmp_path / "bad.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "good.py").write_text(
        "import os, sys, pathlib; pathlib.Path(sys.argv[sys.argv.index('--out') + 1], 'good.txt')"
        ".write_text(' '.join(sys.argv[1:]) + str('OMP_NUM_THREADS' in os.environ))"
    )
    monkeypatch.setattr(run, "HERE", tmp_path)
    jobs = (run.Job("first", "bad"), run.Job("second", "good", "--some 'two words'"))
    monkeypatch.setitem(run.PLANS, "quick", run.Plan(3, jobs))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "out"


def test_a_failure_stops_nothing(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["quick", "--out", str(plan)]) == 1
    assert (plan / "good.txt").read_text() == f"--some two words --out {plan} --name secondFalse"
    record = json.loads((plan / "run_quick.json").read_text())
    assert [(job["name"], job["code"]) for job in record["jobs"]] == [("first", 3), ("second", 0)]
    assert record["plan"] == "quick"
    told = capsys.readouterr().out
    assert "first  failed, exit code 3" in told
    assert "of 180 s" in told


def test_only_some(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["quick", "--out", str(plan), "--only", "second"]) == 0
    assert [job["name"] for job in json.loads((plan / "run_quick.json").read_text())["jobs"]] == ["second"]
    with pytest.raises(SystemExit):
        run.main(["quick", "--only", "third"])
    assert "no job of quick is named third" in capsys.readouterr().err


def test_list_runs_nothing(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["quick", "--out", str(plan), "--list"]) == 0
    assert not plan.exists()
    lines = capsys.readouterr().out.splitlines()
    assert shlex.split(lines[1]) == ["python", "benchmarks/good.py", "--some", "two words"]


def test_over_the_limit() -> None:
    done = [run.Done("a", "", 100.0, 100.0, 0), run.Done("b", "", 90.0, 180.0, 0)]
    assert run.summary("quick", done).endswith("190.0 s  in all of 180 s: over the limit")
    assert run.summary("full", done).endswith("190.0 s  in all")
