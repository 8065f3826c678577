"""What is deleted is freed: models, optimizers, steps, graphs and their tensors, whatever was done with them before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from amp_compiler import amp_compile, compile_train_step

pytestmark = pytest.mark.filterwarnings("ignore::amp_compiler.AmpWarning")


class Captured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.calls = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 8:
            raise ValueError("a wrong width")
        self.calls = self.calls + 1
        return self.last(self.norm(self.first(x)).relu())


class Broken(Captured):
    """In two pieces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 8:
            raise ValueError("a wrong width")
        x = self.norm(self.first(x))
        torch._dynamo.graph_break()
        return self.last(x.relu())


class Uncaptured(Captured):
    """Dynamo leaves a function with a break inside a ``try`` as plain Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 8:
            raise ValueError("a wrong width")
        try:
            torch._dynamo.graph_break()
            return self.last(self.norm(self.first(x)).relu()) @ torch.eye(4)
        finally:
            self.calls += 1


MODELS = (Captured, Broken, Uncaptured)


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output.float() - targets).pow(2).mean()


def watched(*objects: Any, model: nn.Module, graphs: list[fx.GraphModule]) -> dict[str, weakref.ref[Any]]:
    """Weak references to everything that has to go."""
    found = {f"{type(o).__name__} {i}": o for i, o in enumerate((model, *objects, *graphs))}
    found.update(model.named_modules(prefix="module"))
    found.update(model.named_parameters())
    found.update((f"gradient of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None)
    found.update(model.named_buffers())
    return {name: weakref.ref(o) for name, o in found.items()}


def still_alive(references: dict[str, weakref.ref[Any]]) -> list[str]:
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


def use_in_every_way(fast: Any) -> None:
    x = torch.randn(4, 8)
    fast(x).sum().backward()
    with torch.no_grad():
        fast(x)
    fast.eval()
    fast(x)
    fast.train()
    fast(torch.randn(3, 8))
    with pytest.raises(ValueError, match="wrong width"):
        fast(torch.randn(4, 9))
    fast.report(inputs=x)


@pytest.mark.parametrize("kind", MODELS)
def test_a_compiled_model_is_freed(kind: type[nn.Module]) -> None:
    model = kind()
    fast = amp_compile(model)
    use_in_every_way(fast)
    references = watched(fast, model=model, graphs=fast.graphs)
    del fast, model
    assert still_alive(references) == []


@pytest.mark.parametrize("kind", MODELS)
def test_a_training_step_is_freed(kind: type[nn.Module]) -> None:
    model = kind()
    optimizer = torch.optim.Adam(model.parameters())
    step = compile_train_step(model, loss, optimizer, dtype=torch.float16, accumulate_steps=2)
    x, targets = torch.randn(4, 8), torch.zeros(4, 4)
    for _ in range(4):
        step(x, targets)
    with pytest.raises(ValueError, match="wrong width"):
        step(torch.randn(4, 9), targets)
    for _ in range(2):
        result = step(x * 1e30, targets)
    assert bool(result.skipped)
    assert step.explain_overflow().phase
    references = watched(step, optimizer, model=model, graphs=[*step.graphs, *step.joint_graphs])
    state = [weakref.ref(t) for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    references.update((f"state {i}", t) for i, t in enumerate(state))
    del model, optimizer, step, result
    assert still_alive(references) == []


def test_a_step_that_a_model_knows_of_is_freed() -> None:
    """A part of the model leads to the whole: from the values that an update may have to put back, to the model."""
    model = Captured()
    model.first.__dict__["root"] = model
    step = compile_train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), accumulate_steps=2)
    step(torch.randn(4, 8), torch.zeros(4, 4))  # in the middle of an update
    references = watched(step, model=model, graphs=step.graphs)
    del model, step
    assert still_alive(references) == []


def compiled_function(model: nn.Module) -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        return model(x) + 1

    return amp_compile(call, level="O1")


def compiled_method(model: nn.Module) -> Any:
    model.forward = amp_compile(model.forward)
    return model


def decorated_method(model: nn.Module) -> Any:
    class Around(nn.Module):
        @amp_compile(level="auto")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    around = Around()
    around.inner = model
    return around


@pytest.mark.parametrize("how", [compiled_function, compiled_method, decorated_method])
def test_what_a_function_or_method_calls_is_freed(how: Callable[[nn.Module], Any]) -> None:
    model = Broken()
    fast = how(model)
    fast(torch.randn(4, 8)).sum().backward()
    references = watched(fast, model=model, graphs=[])
    del fast, model
    assert still_alive(references) == []


def test_either_name_alone_keeps_everything_working() -> None:
    x = torch.randn(4, 8)
    model = Broken().eval()
    expected = model(x)
    fast = amp_compile(model)
    low = fast(x)
    assert low.dtype is torch.float32
    assert not torch.equal(low, expected)
    del fast
    gc.collect()
    assert torch.equal(model(x), expected)

    again = amp_compile(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert torch.equal(again(x), low)
    assert reference() is not None
    again(x).sum().backward()


def test_a_result_outlives_its_model() -> None:
    """Autograd keeps what the backward needs, and no more."""
    fast = amp_compile(Broken())
    x = torch.randn(4, 8, requires_grad=True)
    result = fast(x).sum()
    reference = weakref.ref(fast)
    del fast
    assert still_alive({"fast": reference}) == []
    result.backward()
    assert x.grad is not None
