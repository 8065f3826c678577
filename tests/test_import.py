"""Importing the package stays light: one new process imports torch, then the package, then uses it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "torch._inductor", "torch.export", "torch.fx.experimental.proxy_tensor", "sympy")
TOOLS = ("triton", "rich", "typer", "click", "amp_compiler.cli", "amp_compiler.inspect.render")

PROCESS = """
import json, sys
stages = {}
import torch
stages["torch"] = list(sys.modules)
import amp_compiler, amp_compiler.kernels
stages["package"] = list(sys.modules)
from amp_compiler import amp_compile, Policy, precision, compile_train_step, DynamicLossScaler, all_finite
stages["names"] = list(sys.modules)
model = torch.nn.Linear(4, 2)
step = compile_train_step(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1))
step(torch.ones(3, 4), torch.ones(3, 2))
stages["used"] = list(sys.modules)
print(json.dumps(stages))
"""


@pytest.fixture(scope="module")
def modules() -> dict[str, set[str]]:
    """The modules that are loaded after each stage."""
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True)
    return {stage: set(names) for stage, names in json.loads(done.stdout).items()}


@pytest.mark.parametrize("stage", ["package", "names"])
def test_nothing_heavy_comes_in_that_torch_alone_does_not_bring(modules: dict[str, set[str]], stage: str) -> None:
    new = modules[stage] - modules["torch"]
    assert {m for m in new if m in HEAVY or f"{m}.".startswith(tuple(f"{t}." for t in TOOLS))} == set()


def test_no_triton_kernel_is_imported_before_a_gpu_asks(modules: dict[str, set[str]]) -> None:
    assert [m for m in modules["used"] if m.startswith("amp_compiler") and "triton" in m] == []
