"""Other code takes a compiled module for the module it was made from: wraps its forward, asks for its class and
signature, sets attributes on it, gives it another class."""

import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from amp_compiler import AmpModule, AmpWarning, amp_compile, set_precision
from amp_compiler.common.errors import ArgumentError

BF16 = torch.bfloat16


class Net(nn.Module):
    """A signature that is worth keeping, an attribute, and a method of nn.Module that it made its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.config = {"scale": 1.0}
        self.moves = 0

    def forward(self, x: Tensor, scale: float = 1.0, *, flip: bool = False) -> Tensor:
        """What the model does."""
        y = self.fc(x) * scale
        return -y if flip else y

    def to(self, *args: Any, **kwargs: Any) -> "Net":
        self.moves += 1
        return super().to(*args, **kwargs)


class Upper(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu()


def compiled(model: Any, level: str = "O2", **options: Any) -> AmpModule:
    return amp_compile(model, level, dtype=BF16, backend="eager", **options)


def batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------ a forward around a forward


def test_a_forward_around_the_forward() -> None:
    model = Net()
    fast = compiled(model)
    x, before, kept = batch(), fast(batch()), dict(model.__dict__)
    old = fast.forward
    fast.forward = lambda *args: old(*args) + 1
    assert torch.equal(fast(x), before + 1)
    inner = fast.forward
    fast.forward = lambda *args: inner(*args) * 2
    assert torch.equal(fast(x), (before + 1) * 2)
    assert model.__dict__ == kept
    assert torch.allclose(model(x), before, atol=0.05)
    del fast.forward
    assert torch.equal(fast(x), before)
    assert fast.forward == fast.forward


def test_a_forward_around_the_forward_of_a_sequential() -> None:
    fast = compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "O1")
    before, old = fast(batch()), fast.forward
    fast.forward = lambda *args, **kwargs: old(*args, **kwargs) + 1
    assert torch.equal(fast(batch()), before + 1)
    assert torch.equal(nn.Sequential(fast)(batch()), before + 1)


def test_what_belongs_to_the_wrapper_stays_there() -> None:
    """The names that Accelerate and others put on what they prepare, hooks, and nn.Module.compile."""
    model = Net()
    fast = compiled(model)
    kept = dict(model.__dict__)
    fast._original_forward = fast.forward
    fast._is_prepared = True
    fast.bound = fast.forward
    fast.state_dict = lambda: {"mine": 1}
    fast.register_forward_hook(lambda module, args, out: out + 1)
    fast.compile(backend="eager")
    assert model.__dict__ == kept
    assert fast.state_dict() == {"mine": 1}
    assert fast.__dict__.pop("_original_forward") == fast.forward
    assert fast._is_prepared
    with torch.no_grad():
        assert torch.allclose(fast(batch()), model(batch()) + 1, atol=0.05)
    del fast._is_prepared
    assert not hasattr(fast, "_is_prepared")
    assert "_is_prepared" not in dir(fast)


def test_what_belongs_to_the_model_goes_to_it() -> None:
    model = Net()
    fast = compiled(model)
    model._cache = None
    fast.config = {"scale": 2.0}
    fast.temperature = 0.5
    fast._cache = 3
    fast.gain = nn.Parameter(torch.ones(4))
    fast._extra = nn.Linear(2, 2)
    assert model.config == {"scale": 2.0}
    assert (model.temperature, model._cache) == (0.5, 3)
    assert "gain" in dict(model.named_parameters())
    assert model._extra is fast._extra
    assert {"config", "temperature", "gain"} <= set(dir(fast))


def test_marks_on_the_wrapper_mark_the_model() -> None:
    fast = compiled(Net())
    assert set_precision(fast, "float32") is fast
    fast(batch())
    assert fast.report().by_precision == {"float32": 2}


# ------------------------------------------------------------------------------------------ being what it wraps


def test_signature_and_documentation_are_the_originals() -> None:
    model = Net()
    fast = compiled(model)
    assert inspect.signature(fast.forward) == inspect.signature(model.forward)
    assert fast.forward.__doc__ == "What the model does."
    assert inspect.signature(compiled(model.forward)) == inspect.signature(model.forward)

    def product(a: Tensor, b: Tensor | None = None) -> Tensor:
        return a @ (a if b is None else b)

    assert inspect.signature(compiled(product)) == inspect.signature(product)
    assert inspect.signature(compiled(nn.Sequential(nn.ReLU())).forward).parameters.keys() == {"input"}


def test_it_is_of_the_originals_class_and_of_ours() -> None:
    model = Net()
    fast = compiled(model)
    assert isinstance(fast, Net)
    assert isinstance(fast, AmpModule)
    assert issubclass(fast.__class__, Net)
    for twin in (copy.deepcopy(fast), copy.copy(fast), pickle.loads(pickle.dumps(fast))):
        assert isinstance(twin, Net)
        assert isinstance(twin, AmpModule)
        assert inspect.signature(twin.forward) == inspect.signature(model.forward)
    assert not isinstance(compiled(torch.sin), Net)


def test_what_torch_compile_made_is_not_imitated() -> None:
    """Who meets an OptimizedModule takes the module inside it, and would run that in fp32."""
    inner = torch.compile(Net(), backend="eager")
    fast = compiled(inner)
    assert not isinstance(fast, type(inner))
    assert torch.allclose(fast(batch()), inner._orig_mod(batch()), atol=0.05)


def test_a_sequential_is_a_sequence() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    fast = compiled(model)
    assert isinstance(fast, nn.Sequential)
    assert len(fast) == 3
    assert list(fast) == list(model)
    assert fast[-1] is model[-1]
    assert model[1] in fast
    fast[1] = nn.Tanh()
    assert isinstance(model[1], nn.Tanh)
    assert len(copy.deepcopy(fast)) == len(pickle.loads(pickle.dumps(fast))) == 3
    assert not hasattr(type(compiled(Net())), "__len__")


def test_methods_that_the_model_made_its_own_are_called() -> None:
    model = Net()
    fast = compiled(model)
    assert fast.to(torch.float64) is fast
    assert model.moves == 1
    assert model.fc.weight.dtype is torch.float64


def test_copies_keep_hooks_and_what_others_put_there() -> None:
    fast = compiled(Net())
    fast._tag = ["a"]
    fast.register_forward_hook(add_one)
    plain = fast.original(batch())
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.allclose(twin(batch()), plain + 1, atol=0.05)
        assert twin._tag == ["a"]
        assert twin._tag is not fast._tag


def add_one(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out + 1


# --------------------------------------------------------------------------------------- torch's own wrappers


def test_torchscript_gets_a_clear_error() -> None:
    fast = compiled(Net())
    with pytest.raises(ArgumentError, match=r"torch.jit.script cannot script.*convert_model"):
        torch.jit.script(fast)
    with pytest.raises(ArgumentError, match=r"torch.jit.script cannot script"):
        torch.jit.script(nn.Sequential(fast))
    with pytest.raises(ArgumentError, match=r"torch.jit.trace cannot trace.*compiled.original"):
        torch.jit.trace(fast, (batch(),))
    fast.enabled = False
    assert torch.jit.trace(fast, (batch(),))(batch()).shape == (3, 4)


def test_torch_compile_around_it_keeps_its_precision() -> None:
    fast = compiled(Net())
    expected = fast(batch())
    assert torch.equal(torch.compile(fast, backend="eager")(batch()), expected)
    assert torch.equal(torch.compile(nn.Sequential(fast), backend="eager")(batch()), expected)


def test_torch_export_says_that_it_exports_fp32() -> None:
    for model in (compiled(Net()), nn.Sequential(compiled(Net()))):
        with pytest.warns(AmpWarning, match="convert_model"):
            program = torch.export.export(model, (batch(),))
        assert torch.equal(program.module()(batch()), (model[0] if isinstance(model, nn.Sequential) else model)
                           .original(batch()))  # fmt: skip


def test_parametrizations_of_the_compiled_module_itself() -> None:
    model = nn.Linear(4, 4)
    fast = compiled(model)
    fast(batch())
    parametrize.register_parametrization(fast, "weight", Upper())
    assert parametrize.is_parametrized(fast)
    low = model.weight.detach().triu().to(BF16)
    assert torch.equal(fast(batch()), nn.functional.linear(batch().to(BF16), low, model.bias.to(BF16)).float())
    parametrize.remove_parametrizations(fast, "weight")
    assert type(model) is nn.Linear
    assert torch.equal(model.weight, model.weight.triu())
    assert not hasattr(nn.Linear, "weight")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fully_shard_takes_it(one_rank: Any) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    single = compiled(copy.deepcopy(model))
    fast = compiled(model)
    assert fully_shard(fast, mesh=one_rank) is fast
    assert isinstance(fast, FSDPModule)
    assert isinstance(fast, nn.Sequential)
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    out, expected = fast(batch()), single(batch())
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    for mine, other in zip(fast.parameters(), single.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), other.grad)
    optimizer.step()
    assert fast.report().by_precision == {"bfloat16": 3}
    fast.unshard()
    fast.reshard()
    fast.set_requires_gradient_sync(False)
    assert fast.to(torch.float32) is fast


def test_a_copy_of_a_compiled_method_is_one() -> None:
    """A model whose forward was compiled in place may be copied: the copy computes with its own weights."""
    model = nn.Linear(2, 2)
    model.forward = amp_compile(model.forward, dtype=torch.bfloat16)  # type: ignore[method-assign]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.fill_(3.0)
    assert type(twin.forward) is type(model.forward)
    assert torch.equal(twin(torch.ones(1, 2)), torch.full((1, 2), 3.0))
    assert not torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 3.0))
