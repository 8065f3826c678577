"""``requires_grad_()`` on a value inside a model, as the hooks of gradient checkpointing call it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_compiler import AmpWarning, amp_compile, compile_train_step
from helpers import BF16


class Frozen(nn.Module):
    """A frozen embedding whose output is marked by a hook, as ``model.enable_input_require_grads()`` does."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(8, 16), nn.Linear(16, 4)
        self.table.requires_grad_(not frozen)
        self.table.register_forward_hook(lambda module, given, output: output.requires_grad_(True))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens)))


TOKENS = torch.arange(8).reshape(2, 4)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [True, False])
def test_evaluation_is_low_and_one_graph(context: Any, frozen: bool) -> None:
    model = Frozen(frozen).eval()
    compiled = amp_compile(model, dtype=BF16)
    with warnings.catch_warnings(), context():
        warnings.simplefilter("error", AmpWarning)
        found = compiled(TOKENS)
        with torch.autocast("cpu", BF16):
            expected = model(TOKENS)
    assert len(compiled.graphs) == 1
    assert compiled.report().low_flops_share == 1.0
    assert not compiled.report().not_captured
    torch.testing.assert_close(found, expected.float(), atol=0.02, rtol=0.02)
    assert not found.requires_grad


def test_a_marked_value_that_is_returned_is_marked() -> None:
    class Returned(Frozen):
        def forward(self, tokens: Tensor) -> Any:
            hidden = self.table(tokens)
            return hidden, self.head(hidden)

    compiled = amp_compile(Returned(), dtype=BF16)
    with torch.no_grad():
        hidden, found = compiled(TOKENS)
    assert hidden.requires_grad
    assert not found.requires_grad
    assert compiled.report().low_flops_share == 1.0


def test_training_and_evaluation_in_turn() -> None:
    model = Frozen()
    compiled = amp_compile(model, dtype=BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Dynamo's own too
        compiled(TOKENS).sum().backward()
        with torch.no_grad():
            compiled.eval()(TOKENS)
    assert model.head.weight.grad is not None
    assert model.table.weight.grad is None
    assert compiled.report().low_flops_share == 1.0


def test_a_training_step() -> None:
    model = Frozen()
    before = model.head.weight.detach().clone()
    step = compile_train_step(model, lambda out, _: out.square().mean(), torch.optim.SGD(model.parameters(), 0.1),
                              dtype=BF16)  # fmt: skip
    assert step(TOKENS).loss.isfinite()
    assert not torch.equal(before, model.head.weight)
    assert step.report().low_flops_share == 1.0


def test_a_marked_value_inside_of_a_checkpoint() -> None:
    class Checkpointed(Frozen):
        def forward(self, tokens: Tensor) -> Tensor:
            return checkpoint(super().forward, tokens, use_reentrant=False).detach() + 1

    compiled = amp_compile(Checkpointed(), dtype=BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(compiled(TOKENS), Checkpointed()(TOKENS), atol=0.02, rtol=0.02)
    assert compiled.report().low_flops_share == 1.0


def test_a_graph_that_computes_gradients_runs_unchanged() -> None:
    class Force(nn.Module):
        """Energy and its gradient, as models of molecules return them."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            place = x.detach().requires_grad_()
            return torch.autograd.grad(self.fc(place).tanh().sum(), place)[0]

    x = torch.ones(2, 4)
    # Not by monkeypatch, which would delete the setting: torch keeps settings outside of the module's __dict__.
    with torch._dynamo.config.patch(trace_autograd_ops=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        found = amp_compile(Force(), dtype=BF16)(x)
    torch.testing.assert_close(found, Force()(x), atol=0.02, rtol=0.02)
