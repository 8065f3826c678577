"""No test of the GPU is dead code where there is none: each one takes the stand-in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.chosen import CHOSEN

ROOT = Path(__file__).parents[1]
#: how a test marked gpu gets to a device: by a case, on a GPU or on the stand-in; or by processes, on GPUs or CPUs
WAYS = ("answer", "is_fine", "_converted", "run_processes")


def marked() -> Iterator[tuple[Path, ast.FunctionDef]]:
    """All test functions marked ``gpu``, with the files that they are in."""
    for path in sorted(ROOT.rglob("test_*.py")):
        text = path.read_text()
        if "mark.gpu" not in text:
            continue
        tree = ast.parse(text)
        whole = any(isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n) and "mark.gpu" in ast.unparse(n)
                    for n in tree.body)  # fmt: skip
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            if whole or any("mark.gpu" in ast.unparse(d) for d in node.decorator_list):
                yield path, node


def test_there_are_tests_of_the_gpu() -> None:
    files = {path.name for path, _ in marked()}
    assert {"test_device.py", "test_inductor.py", "test_steps.py", "test_zoo_models.py"} <= files


@pytest.mark.parametrize(("path", "test"), [pytest.param(p, t, id=f"{p.stem}-{t.name}") for p, t in marked()])
def test_it_runs_without_a_gpu(path: Path, test: ast.FunctionDef) -> None:
    """It asks for a case, and no condition skips it for want of a GPU."""
    called = {ast.unparse(n.func).split(".")[-1] for n in ast.walk(test) if isinstance(n, ast.Call)}
    assert called & set(WAYS), f"{path.name}: {test.name} has no form that runs here"
    text = "\n".join(ast.unparse(d) for d in test.decorator_list)
    assert "skip" not in text
    assert "xfail" not in text


def test_every_case_is_asked_for() -> None:
    """A case of the chosen ones that no test asks for would run for nothing: each module of cases has its tests."""
    text = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert all(f'"{module}"' in text for module in CHOSEN)
    assert all(f'"{path.stem}"' in text for path in Path(__file__).parent.glob("cases_*.py"))
