"""A model has the same attributes, objects and modes after every public call that is not meant to change it."""

from __future__ import annotations

import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from amp_compiler import Policy, amp_compile, compile_train_step, convert_model
from amp_compiler.cli.app import app
from amp_compiler.common.errors import AmpError, ArgumentError
from amp_compiler.inspection import inspect_model

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 2)


class Block(nn.Module):
    """A buffer, a tensor and a number that are not registered, a list, and code that asks for a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))
        self.register_buffer("temporary", torch.ones(4), persistent=False)
        self.scale, self.shift = 2.0, torch.ones(4)
        self.notes: list[str] = ["made"]
        self.nothing = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) + self.offset * self.temporary + self.shift
        return y.to(x.dtype) * self.scale


class Calls:
    """Bound methods of an object as hooks."""

    def __init__(self) -> None:
        self.number = 0

    def before(self, module: nn.Module, args: Any) -> None:
        pass

    def after(self, module: nn.Module, args: Any, result: Any) -> None:
        pass


def model() -> nn.Module:
    torch.manual_seed(0)
    block = Block()
    net = nn.Sequential(block, nn.Dropout(0.1), nn.LayerNorm(4), nn.Linear(4, 2))
    calls = Calls()
    net.register_forward_pre_hook(calls.before)
    block.register_forward_hook(calls.after)
    block.inner.register_forward_hook(lambda module, args, result: None)
    net[3].register_full_backward_hook(lambda module, grad_in, grad_out: None)
    block.register_state_dict_post_hook(lambda *args: None)
    return net


def described(value: Any) -> Any:
    """Equal to another if nothing was exchanged, added or taken away; what a tensor holds is not looked at."""
    if isinstance(value, dict):
        return type(value), [(key, described(held)) for key, held in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), id(value), [described(held) for held in value]
    if isinstance(value, Tensor):
        return id(value), type(value), value.dtype, value.requires_grad, value.shape, value.data_ptr()
    plain = isinstance(value, (bool, int, float, str, type(None)))
    return value if plain else id(value)


def everything(net: nn.Module) -> dict[str, Any]:
    return {path: (type(m), described(vars(m))) for path, m in net.named_modules()}


def values(net: nn.Module) -> list[Tensor]:
    tensors = [*net.parameters(), *net.buffers(), net[0].shift]  # type: ignore[union-attr, list-item]
    return [t.detach().clone() for t in tensors]


# ----------------------------------------------------------------------------------------------- the calls


def call(net: nn.Module) -> None:
    amp_compile(net)(X)


def call_and_backward(net: nn.Module) -> None:
    amp_compile(net, dtype=torch.float16)(X).sum().backward()


def report(net: nn.Module) -> None:
    fast = amp_compile(net)
    fast.report()
    fast(X)
    fast.report().full()
    fast.report(inputs=X)


def convert(net: nn.Module) -> None:
    convert_model(net, (X,))(X)


def convert_in_vain(net: nn.Module) -> None:
    with pytest.raises(AmpError):
        convert_model(net, (torch.ones(6, 5),))


def train(net: nn.Module) -> None:
    compile_train_step(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.0))(X, Y)


def train_in_pieces(net: nn.Module) -> None:
    step = compile_train_step(
        net, lambda out, target: (float(out.sum()) > 1e9) + (out - target).square().mean(),
        torch.optim.SGD(net.parameters(), 0.0), accumulate_steps=2,
    )  # fmt: skip
    step(X, Y)
    step(X, Y)


def inspect(net: nn.Module, graph: str = "forward", capture: str = "auto") -> None:
    inspect_model(net, (X,), policy=Policy(dtype=torch.bfloat16), graph=graph, capture=capture)


def inspect_joint(net: nn.Module) -> None:
    inspect(net, "joint")


def inspect_by_dynamo(net: nn.Module) -> None:
    inspect(net, "inference", "dynamo")


def inspect_in_vain(net: nn.Module) -> None:
    with pytest.raises(ArgumentError):
        inspect_model(net, (torch.ones(6, 5),), policy=Policy(dtype=torch.bfloat16))


def command_line(net: nn.Module) -> None:
    module: Any = types.ModuleType("a_users_file")
    module.make = lambda: (net, (X,))
    sys.modules["a_users_file"] = module
    try:
        with tempfile.TemporaryDirectory() as folder:
            for command in ("dump", "explain --op linear", f"convert -o {folder}/model.pt2"):
                name, *options = command.split()
                done = CliRunner().invoke(app, [name, "a_users_file:make", *options, "--quiet"])
                assert done.exit_code == 0, done.output
    finally:
        del sys.modules["a_users_file"]


CALLS = (
    call, call_and_backward, report, convert, convert_in_vain, train, train_in_pieces, inspect,
    inspect_joint, inspect_by_dynamo, inspect_in_vain, command_line,
)  # fmt: skip


@pytest.mark.parametrize("public", CALLS, ids=lambda c: c.__name__)
def test_nothing_of_the_model_is_changed(public: Callable[[nn.Module], None]) -> None:
    net = model().train()
    net[1].eval()  # type: ignore[index]  # each module keeps the mode that it has
    before, held = everything(net), values(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of train mode, and of code that is not captured
        public(net)
    assert everything(net) == before
    assert all(torch.equal(new, old) for new, old in zip(values(net), held, strict=True))


@pytest.mark.parametrize("change", [
    lambda net: setattr(net[0], "extra", 1),
    lambda net: setattr(net[0], "scale", 3.0),
    lambda net: net[0].notes.append("x"),
    lambda net: net.eval(),
    lambda net: net[0].register_forward_hook(lambda *args: None),
    lambda net: setattr(net[3], "weight", nn.Parameter(net[3].weight.detach().clone())),
    lambda net: net.append(nn.ReLU()),
])  # fmt: skip
def test_a_change_would_be_seen(change: Callable[[Any], Any]) -> None:
    net = model()
    before = everything(net)
    change(net)
    assert everything(net) != before


# --------------------------------------------------------------------------------- while another thread calls it


def copied(net: nn.Module) -> None:
    convert_model(net, (X,))


def looked_at(net: nn.Module) -> None:
    inspect_model(net, (X,), policy=Policy(dtype=torch.bfloat16), capture="export")


@pytest.mark.parametrize("public", [copied, looked_at])
def test_another_thread_calls_the_model_meanwhile(public: Callable[[nn.Module], None]) -> None:
    """torch.export changes the modules that it traces: they must not be the user's."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    expected, seen, done = net(X), [], threading.Event()

    def loop() -> None:
        try:
            while not done.is_set():
                seen.append(torch.equal(net(X), expected) and net.training)
        except Exception as error:
            seen.append(error)

    other = threading.Thread(target=loop)
    other.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            public(net)
    finally:
        done.set()
        other.join()
    assert set(seen) == {True}


def test_a_model_that_cannot_be_copied_is_traced_itself() -> None:
    net = model()
    net[0].lock = threading.Lock()  # type: ignore[union-attr, assignment]
    before = everything(net)
    with pytest.warns(UserWarning, match="train mode"):
        converted = convert_model(net, (X,))
    assert everything(net) == before
    assert torch.allclose(converted(X), net.eval()(X), atol=0.05)
