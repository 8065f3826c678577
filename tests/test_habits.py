"""The files that other tools read: they parse, and what they run and say is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import amp_compiler

yaml = pytest.importorskip("yaml")  # comes with transformers

ROOT = Path(__file__).parents[1]
HOOKS, WORKFLOW = ROOT / ".pre-commit-config.yaml", ROOT / ".github" / "workflows" / "test.yml"
BUG, CITATION = ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml", ROOT / "CITATION.cff"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def make_targets() -> set[str]:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    return set(phony[1].split())


def commands() -> list[str]:
    jobs = read(WORKFLOW)["jobs"].values()
    hooks = [hook["entry"] for repo in read(HOOKS)["repos"] for hook in repo["hooks"]]
    return [*hooks, *(step["run"] for job in jobs for step in job["steps"] if "run" in step)]


def test_hooks_and_workflow_run_make_targets_that_exist() -> None:
    found = [command.split()[:2] for command in commands()]
    assert {word for word, _ in found} == {"make"}
    assert {target for _, target in found} == {"lint", "types", "test", "test-torch"}
    assert {target for _, target in found} <= make_targets()


def test_the_workflow_runs_every_release_that_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    jobs = read(WORKFLOW)["jobs"]
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    assert project["requires-python"] == f">={pythons[0]}"
    pinned = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    releases = [pinned[1], *jobs["other-torch"]["strategy"]["matrix"]["torch"]]
    oldest, untested = re.search(r"torch>=2\.(\d+),<2\.(\d+)", str(project["dependencies"])).groups()  # type: ignore
    assert [r.split(".")[1] for r in releases] == [str(n) for n in range(int(oldest), int(untested))]


def test_the_workflow_needs_no_secret() -> None:
    assert "secrets." not in WORKFLOW.read_text()


def test_a_bug_asks_for_the_doctor_a_model_and_the_error() -> None:
    asked = {part["id"]: part for part in read(BUG)["body"]}
    assert "amp-compiler doctor" in asked["doctor"]["attributes"]["label"]
    assert all(asked[name]["validations"]["required"] for name in ("doctor", "model", "error"))


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert read(CITATION)["version"] == project["version"] == amp_compiler.__version__
    assert read(CITATION)["license"] == project["license"]
    assert f"## {amp_compiler.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_is_short_and_begins_with_what_is_not_released() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    heads = [line for line in lines if line.startswith("## ")]
    assert heads[0] == "## Unreleased"
    assert len(heads) == len(set(heads))
