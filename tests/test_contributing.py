"""The four recipes of CONTRIBUTING.md, followed to the letter: their files and patches go into a copy of the sources,
and one Python process uses what they add."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = ("Add an op", "Write a pass", "Add a kernel", "Add a level")
FOLDERS = ("amp_compiler", "passes", "kernels")

USE = '''
import torch
from torch import nn
from amp_compiler import Policy, amp_compile
from amp_compiler.passes import order
from amp_compiler.policy.ops.row import OpClass

# an op: the table has it, and what it reads is cast to fp32
assert Policy("O2").classify("_compute_linear_combination").cls is OpClass.FP32
fast = amp_compile(lambda x, w, c: torch._compute_linear_combination(x @ w, c), dtype=torch.bfloat16)
with torch.no_grad():  # it has no derivative
    fast(torch.ones(3, 4, 4), torch.ones(4, 4), torch.ones(2, 3))
found = {row.op: (row.precision, row.rule) for row in fast.report().rows}
assert found["_compute_linear_combination"] == ("float32", "table"), fast.report().full()

# a pass: it runs in its place, and its rewrite is in the graph that runs
assert "fold_negations" in order.ALL
fast = amp_compile(lambda x, w: -(-(x @ w)) * 2, dtype=torch.bfloat16)
x, w = torch.randn(4, 4), torch.randn(4, 4)
with torch.no_grad():
    result = fast(x, w)
stages = {stage.name: stage for stage in fast.history}
assert stages["fold_negations"].modified
assert "neg" in stages["normalize"].text and "neg" not in fast.history[-1].text
assert torch.equal(result, (x.bfloat16().float() @ w.bfloat16().float()).bfloat16().float() * 2)
kept = amp_compile(lambda x, w: -(-(x @ w)), dtype=torch.bfloat16, keep_output_dtypes=False)
with torch.no_grad():
    kept(x, w)
assert not {stage.name: stage for stage in kept.history}["fold_negations"].modified, "a result that is returned stays"
def written(x):
    b = -(-x)
    x.add_(1)
    return b * 1
with torch.no_grad():
    assert torch.equal(amp_compile(written)(torch.zeros(2)), torch.zeros(2)), "what is written to is not read later"

# its fact can fail
from amp_compiler.common.errors import VerifyError
from amp_compiler.rewrite.base import Context, Place
from amp_compiler.rewrite.facts import UNNEGATED
graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: -(-(x + 1)) * 2)(torch.ones(2))
try:
    UNNEGATED.check(graph, Context(Policy("O2")), Place("nothing"))
except VerifyError as error:
    assert "which is a negation itself" in str(error)
else:
    raise AssertionError("the check found nothing")

# a kernel: it stands for the op, the report says why, and the numbers are the reference's
fast = amp_compile(nn.Sequential(nn.Linear(8, 8), nn.SiLU()), dtype=torch.bfloat16)
with torch.no_grad():
    fast(torch.randn(3, 8))
assert any(kernel.op == "amp::silu" and "float32" in kernel.reason for kernel in fast.report().kernels), fast.report()
from amp_compiler.kernels import silu
x = torch.randn(5, dtype=torch.bfloat16)
assert torch.equal(torch.ops.amp.silu(x), silu.reference(x))
torch.library.opcheck(torch.ops.amp.silu.default, (x,))

# a level: one row
fast = amp_compile(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Tanh()), level="norms", dtype=torch.bfloat16)
fast(torch.randn(3, 8))
found = {row.op: row.precision for row in fast.report().rows}
assert found == {"linear": "bfloat16", "softmax": "bfloat16", "tanh": "float32"}, found
print("done")
'''


def section(name: str) -> str:
    found = re.search(rf"^## {name}\n(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with all four recipes applied."""
    copy = tmp_path_factory.mktemp("contributing")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.split():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    for recipe in RECIPES:
        text = section(recipe)
        for block in blocks(text, "python"):
            path, _, code = block.removeprefix("# ").partition("\n")
            assert not (copy / path).exists(), f"{path} is there already: CONTRIBUTING needs another example"
            (copy / path).write_text(code, encoding="utf-8")
        for patch in blocks(text, "diff"):
            done = subprocess.run(
                ["git", "apply", "--recount", "--unsafe-paths", "--unidiff-zero", f"--directory={copy}", "-"],
                input=patch, cwd=copy, capture_output=True, text=True, check=False,
            )  # fmt: skip
            hint = f"bring the recipe {recipe!r} in CONTRIBUTING.md up to date"
            assert done.returncode == 0, f"{hint}: {done.stderr}\n{patch}"
    for folder in ("passes", "kernels"):  # as an installed package has them
        (copy / "amp_compiler" / folder).symlink_to(copy / folder)
    return copy


def test_every_recipe_changes_something() -> None:
    for recipe in RECIPES:
        assert blocks(section(recipe), "diff"), recipe


def test_the_recipes_work(copy: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(copy), "AMP_VERIFY": "deep", "AMP_CPU_KERNELS": "python"}
    done = subprocess.run([sys.executable, "-c", USE], cwd=copy, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "done"


def test_the_recipes_pass_lint(copy: Path) -> None:
    new = [path for recipe in RECIPES for b in blocks(section(recipe), "python")
           for path in [b.removeprefix("# ").partition("\n")[0]]]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), *new],
        cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
