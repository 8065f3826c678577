"""Code that prints: with Dynamo's setting for it the model is one graph, and every line is printed, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_compiler import amp_compile, compile_train_step


@pytest.fixture(autouse=True)
def prints_at_the_end() -> Iterator[None]:
    torch._dynamo.reset()
    config = torch._dynamo.config
    with config.patch(reorderable_logging_functions={*config.reorderable_logging_functions, print}):
        yield
    torch._dynamo.reset()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        print("inner", x.dtype, tuple(x.shape))
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        print("outer", (x.sum() * 0).abs())
        print(f"formatted {x.shape[0]}")
        return self.second(x)


LINES = ["inner torch.float32 (2, 4)", "outer tensor(0.", "formatted 2"]


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def same(lines: list[str], times: int) -> bool:
    return len(lines) == 3 * times and all(line.startswith(LINES[i % 3]) for i, line in enumerate(lines))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_module_prints_in_every_call(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    fast = amp_compile(Model(), level=level, dtype=torch.bfloat16)
    fast(torch.ones(2, 4))
    fast(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        fast(torch.ones(2, 4))
    assert same(printed(capsys), 3)
    assert fast.report().not_captured == ()


def test_keyword_arguments_of_a_print_are_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    class Separated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            print("a", "b", sep="-")
            print((x.sum() * 0).abs(), end="|\n")
            return x * 2

    fast = amp_compile(Separated(), dtype=torch.bfloat16)
    fast(torch.ones(2, 4))
    assert fast.report().not_captured  # the graph breaks there
    lines = printed(capsys)
    assert lines[0] == "a-b"
    assert lines[1].endswith("|")


def test_a_training_step_prints_and_is_one_graph(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_train_step(model, nn.functional.mse_loss, optimizer, dtype=torch.bfloat16)
    for _ in range(2):
        loss = step(torch.ones(2, 4), torch.zeros(2, 2)).loss
        assert loss.dim() == 0
    assert same(printed(capsys), 2)
    assert len(step.joint_graphs) == 1
    assert step.report().not_captured == ()


def test_a_print_after_a_graph_break_and_before(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            print("outer", (x.sum() * 0).abs())
            print(f"formatted {x.shape[0]}")
            return self.second(x)

    fast: Any = amp_compile(Broken(), dtype=torch.bfloat16)
    fast(torch.ones(2, 4))
    fast(torch.ones(2, 4))
    assert same(printed(capsys), 2)


def test_a_print_in_a_checkpointed_region_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def part(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            print("inside", (x.sum() * 0).abs())
            return x

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.part, x, use_reentrant=False)

    fast: Any = amp_compile(Checkpointed(), dtype=torch.bfloat16)
    fast(torch.ones(2, 4))
    assert [line[:6] for line in printed(capsys)] == ["inside"]


def test_torch_compile_beside_it_is_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    amp_compile(Model(), dtype=torch.bfloat16)(torch.ones(2, 4))
    printed(capsys)
    torch.compile(Model().second, backend="eager")(torch.ones(2, 4))

    def scaled(x: Tensor) -> Tensor:
        print("scaled", x.sum())
        return 2 * x

    torch.compile(scaled, backend="eager")(torch.ones(2))
    assert printed(capsys) == ["scaled tensor(2.)"]
