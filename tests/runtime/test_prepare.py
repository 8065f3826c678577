"""The CPU's kernels are made ready by the back end, before passes choose them, and only for graphs that use them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from amp_compiler import Policy, amp_compile, compile_train_step, convert_model
from amp_compiler.inspection import inspect_model
from amp_compiler.kernels import build, cpu, lowering
from amp_compiler.passes import fuse_cast_matmul

X = torch.ones(2, 4)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in which order: the kernels are made ready, or a pass asks how products run."""
    seen: list[str] = []
    monkeypatch.setenv(cpu.SETTING, "wide")
    ready = build.prepare

    def prepare() -> build.Built:
        seen.append("prepare")
        return ready()

    def asked(choose: Callable[..., bool]) -> Callable[..., bool]:
        def choose_and_say(*args: object) -> bool:
            seen.append("choose")
            return choose(*args)

        return choose_and_say

    monkeypatch.setattr(build, "prepare", prepare)
    monkeypatch.setattr(fuse_cast_matmul, "product_runs_wide", asked(cpu.product_runs_wide))
    monkeypatch.setattr(lowering, "runs_wide", asked(cpu.runs_wide))
    return seen


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def called(**options: object) -> None:
    amp_compile(model(), **options)(X)  # type: ignore[arg-type]


def trained() -> None:
    net = model()
    compile_train_step(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1))(X, X)


def converted() -> None:
    convert_model(model().eval(), (X,))(X)


def inspected() -> None:
    inspect_model(model(), (X,), policy=Policy(dtype=torch.bfloat16), graph="inference")


@pytest.mark.parametrize("use", [called, trained, converted, inspected])
def test_before_passes_choose(use: Callable[[], None], log: list[str]) -> None:
    use()
    assert log[0] == "prepare"
    assert "choose" in log


@pytest.mark.parametrize("setting", ["native", "python"])
def test_not_where_the_setting_says_otherwise(
    setting: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cpu.SETTING, setting)
    called()
    assert "prepare" not in log


@pytest.mark.parametrize(
    "options",
    [{"level": "O0"}, {"policy": Policy.torch("cpu", torch.bfloat16)},
     {"disable_passes": ["fuse_cast_matmul", "lower_kernels"]}],
    ids=["fp32", "as-autocast", "disabled"],
)  # fmt: skip
def test_not_for_graphs_without_them(options: dict[str, object], log: list[str]) -> None:
    called(**options)
    assert "prepare" not in log


def test_asking_how_products_run_compiles_nothing(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in cpu.CHOICES:
        monkeypatch.setenv(cpu.SETTING, setting)
        for dtype in (torch.float16, torch.bfloat16):
            cpu.runs_wide(dtype)
            cpu.wants_compiled(dtype)
            cpu.reason(dtype)
    assert log == []
