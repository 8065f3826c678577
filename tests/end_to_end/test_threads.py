"""Compiled models in several threads at once: right results, and no switch of the process left changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from amp_compiler import amp_compile, compile_train_step, precision

pytestmark = pytest.mark.filterwarnings("ignore::amp_compiler.AmpWarning")


def switches() -> dict[str, Any]:
    """What a capture could leave changed in this process or thread."""
    return {
        "mha": torch.backends.mha.get_fastpath_enabled(),
        "rnn": torch._dynamo.config.allow_rnn,
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "modes": torch._C._len_torch_function_stack(),
        "precision": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def _switches_stay() -> Iterator[None]:
    before = switches()
    yield
    assert switches() == before


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that run in threads of their own and begin together."""
    results: list[Any] = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def run(place: int) -> None:
        start.wait()
        try:
            results[place] = calls[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0])


class Broken(nn.Module):
    """In pieces, with a precision scope that Python opens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        with precision("float32"):
            torch._dynamo.graph_break()
            x = self.first(x)
        if fail:
            raise ValueError("as asked")
        return self.last(x)


def test_two_models_at_two_levels_captured_at_once() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    models = [(encoder, "O2"), (Recurrent().eval(), "O1"), (Broken().eval(), "O3")]
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        alone = [amp_compile(model, level=level)(x) for model, level in models]
        plain = [model(x) for model, _ in models]
    for expected, fp32 in zip(alone, plain, strict=True):
        assert not torch.equal(expected, fp32)
    seen: list[dict[str, Any]] = []

    def use(model: nn.Module, level: str) -> list[torch.Tensor]:
        before = switches()
        with torch.no_grad():
            fast = amp_compile(model, level=level)
            found = [fast(x) for _ in range(3)]
        seen.append(before)
        seen.append(switches())
        return found

    def other_code() -> list[torch.Tensor]:
        """What a thread that knows nothing of us sees, and puts back, while the others capture."""
        found = []
        for _ in range(40):
            seen.append(switches())
            torch.backends.mha.set_fastpath_enabled(torch.backends.mha.get_fastpath_enabled())
            with torch.no_grad():
                found.append(encoder(x))
        return found

    calls = [lambda m=model, at=level: use(m, at) for model, level in models]
    *results, others = at_once(*calls, other_code)
    for (model, level), found, expected in zip(models, results, alone, strict=True):
        assert [torch.equal(y, expected) for y in found] == [True] * 3, (type(model).__name__, level)
    assert all(torch.equal(y, plain[0]) for y in others)
    assert len({str(values) for values in seen if values["grad"]}) == 1


def test_one_model_in_several_threads() -> None:
    torch.manual_seed(0)
    fast = amp_compile(Broken())
    xs = [torch.randn(3, 8) for _ in range(3)]

    def use(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for fail in (False, True, False):
            try:
                found.append(fast(x, fail))
            except ValueError:
                found.append(torch.zeros(()))
        return found

    results = at_once(*(lambda x=x: use(x) for x in xs))
    again = amp_compile(fast.original)
    for x, found in zip(xs, results, strict=True):
        assert torch.equal(found[0], again(x))
        assert torch.equal(found[2], found[0])
        assert found[1].dim() == 0


def test_training_steps_in_two_threads() -> None:
    def train(level: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = compile_train_step(model, nn.functional.mse_loss, optimizer, level)
        x = torch.randn(6, 8, generator=generator)
        return [step(x, x[:, :4]).loss for _ in range(3)]

    results = at_once(lambda: train("O1"), lambda: train("O2"))
    for level, found in zip(("O1", "O2"), results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, train(level), strict=True))


class Generator(nn.Module):
    """Calls itself from a method, as ``generate`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def generate(self, x: torch.Tensor, times: int = 2, fail: bool = False) -> torch.Tensor:
        for _ in range(times):
            x = self(x) if times % 2 else self.forward(x)
            self.calls += 1
            if fail:
                raise ValueError("as asked")
        return x

    def itself(self) -> Generator:
        return self


def test_methods_find_the_compiled_forward_and_leave_the_model_alone() -> None:
    torch.manual_seed(0)
    model = Generator()
    fast = amp_compile(model)
    x = torch.randn(3, 8)
    low = fast(fast(x))
    plain = model.generate(x)
    assert not torch.equal(low, plain)

    def compiled() -> torch.Tensor:
        with pytest.raises(ValueError, match="as asked"):
            fast.generate(x, fail=True)
        return fast.generate(x)

    def original() -> list[torch.Tensor]:
        return [model.generate(x) for _ in range(50)]

    one, two, others = at_once(compiled, compiled, original)
    assert torch.equal(one, low)
    assert torch.equal(two, low)
    assert all(torch.equal(y, plain) for y in others)
    assert "forward" not in model.__dict__
    assert model.calls == 2 + 2 * 3 + 50 * 2
    assert isinstance(fast.itself(), type(fast))
    fast.enabled = False
    assert torch.equal(fast.generate(x), plain)


def test_hooks_run_once_for_each_call_of_a_method() -> None:
    model, seen = Generator(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    amp_compile(model).generate(torch.randn(3, 8), 3)
    assert len(seen) == 3
