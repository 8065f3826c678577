"""backend="inductor": the whole step compiled, forward and backward, with the same updates up to rounding."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code

from amp_compiler import compile_train_step
from amp_compiler.capture import inductor
from networks import EncoderLayer


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_inductor_updates_as_eager_does(accumulate_steps: int) -> None:
    """And it skips a batch that is not finite, and puts the statistics back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    batches = [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(4)]
    trained = {}
    for backend in ("eager", "inductor"):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, fused=True)
        step = compile_train_step(
            own, F.mse_loss, optimizer, level="O0", backend=backend, accumulate_steps=accumulate_steps
        )
        for batch in batches:
            step(*batch)
        assert len(step.joint_graphs) == 1
        before = copy.deepcopy(own.state_dict())
        for _ in range(accumulate_steps):
            result = step(torch.full((6, 4), float("inf")), batches[0][1])
        assert bool(result.skipped)
        assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
        trained[backend] = own.state_dict()
    for name, value in trained["eager"].items():
        # fp32 on both sides: sums in another order, over four small batches
        torch.testing.assert_close(trained["inductor"][name], value, rtol=1e-4, atol=1e-5)


class Attentive(nn.Module):
    """A layer of a transformer: casts move over its views and meet in its sums."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(20, 32)
        self.layer = EncoderLayer(32, 4, 64)
        self.out = nn.Linear(32, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.token(ids) + 1).mean(1))


@pytest.mark.parametrize(("dtype", "kernels"), [
    (torch.bfloat16, "auto"), pytest.param(torch.float16, "native", marks=pytest.mark.zoo),
])  # fmt: skip
def test_a_low_step_under_inductor_is_the_eager_one(
    dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's fused ops round where the graph says so; torch's own round inside some ops too (a mean, a norm)."""
    monkeypatch.setenv("AMP_CPU_KERNELS", kernels)
    torch.manual_seed(0)
    model, ids, y = Attentive(), torch.randint(20, (4, 8)), torch.randint(4, (4,))
    gradients, ops = {}, {}
    for backend in ("eager", "inductor"):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, fused=True)
        step = compile_train_step(own, F.cross_entropy, optimizer, level="O2", dtype=dtype, backend=backend)
        assert not bool(step(ids, y).skipped)
        gradients[backend] = {name: p.grad.clone() for name, p in own.named_parameters()}
        ops[backend] = {str(n.target) for n in step.joint_graphs[0].graph.nodes if "amp.cast_matmul" in str(n.target)}
    assert ops["inductor"] == ops["eager"]
    for name, value in gradients["eager"].items():
        if name.endswith("key.bias"):
            continue  # zero but for roundings: softmax does not see what is added to all keys
        # a rounding more or less in each of a dozen ops, relative to the largest gradient of the tensor
        bound = 12 * torch.finfo(dtype).eps * value.abs().max()
        assert (gradients["inductor"][name] - value).abs().max() <= bound, name


class Twice(nn.Module):
    """Two parameters with one gradient, one whose gradient is spread out of a number, and one whose is an input's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.arange(4.0) + i) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.a + self.b) * x).sum() + self.c.sum() + (self.d * x).sum()


def test_gradients_that_share_memory_are_unscaled_once_each() -> None:
    """Inductor leaves out copies that it finds useless; one of a gradient that is unscaled in place is not."""
    model, x = Twice(), torch.tensor([1.0, -2.0, 3.0, 0.5])
    step = compile_train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.0), backend="inductor",
                              loss_scaler=1024.0, dtype=torch.float16)  # fmt: skip
    step(x, None)
    for name, wanted in {"a": x, "b": x, "c": torch.ones(4), "d": x}.items():
        assert torch.equal(getattr(model, name).grad, wanted), name
    assert torch.equal(x, torch.tensor([1.0, -2.0, 3.0, 0.5]))


class Pictures(nn.Module):
    """Convolutions whose gradients go on to other convolutions, and a pool between them."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.inner = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 24, 3, stride=2), nn.ReLU(), nn.Conv2d(24, 8, 1))
        self.last = nn.Linear(8 * 9, 5)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.checkpointed:
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        else:
            x = self.inner(x)
        return self.last(x.flatten(1))


@pytest.mark.parametrize(("level", "checkpointed"), [("O2", False), ("O2", True), ("O0", True)])
def test_images_are_laid_out_for_convolutions(
    level: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels last inside of the step; gradients keep their layout, and so does what one half hands to the other."""
    monkeypatch.setenv("AMP_CPU_KERNELS", "wide")
    torch.manual_seed(0)
    model, x, y = Pictures(checkpointed), torch.randn(4, 3, 14, 14), torch.randint(5, (4,))
    gradients = {}
    for backend in ("eager", "inductor"):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9, fused=True)
        step = compile_train_step(
            own, F.cross_entropy, optimizer, level=level, dtype=torch.bfloat16, backend=backend
        )
        result, sources = run_and_get_code(lambda step=step: step(x, y))
        assert not bool(result.skipped)
        assert len(step.joint_graphs) == 1
        gradients[backend] = {name: p.grad for name, p in own.named_parameters()}
        assert all(p.grad.stride() == p.stride() for p in own.parameters())
    for name, value in gradients["eager"].items():
        # a rounding more or less in each of a dozen ops, relative to the largest gradient of the tensor
        bound = 12 * torch.finfo(torch.bfloat16).eps * value.abs().max()
        assert (gradients["inductor"][name] - value).abs().max() <= bound, name
    if not checkpointed:
        assert "(4, 16, 14, 14), (3136, 1, 224, 16), torch.bfloat16" in "".join(sources)
        assert "(4, 16, 14, 14), (3136, 196, 14, 1), torch.bfloat16" not in "".join(sources)


def test_a_pool_needs_nothing_that_was_imported_before() -> None:
    """torch's decomposition of it reads a module of Inductor's that it does not import."""
    code = """
        import torch
        from amp_compiler.capture.autodiff import decompositions_for
        table = decompositions_for("inductor")
        values, _ = table[torch.ops.aten.max_pool2d_with_indices.default](torch.rand(1, 1, 4, 4), [2, 2], [2, 2])
        assert values.shape == (1, 1, 2, 2)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_another_version_does_not_run_what_this_one_has_compiled() -> None:
    """Inductor keeps compiled graphs on disk; what we ask for beside the graph is part of their key."""
    before = torch.compiler.config.cache_key_tag
    with inductor.generating():
        assert inductor._version() in torch.compiler.config.cache_key_tag
    assert torch.compiler.config.cache_key_tag == before


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.factors + 1).sum(1)


def test_code_for_another_width_of_vectors_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes on two CPUs may share a home directory. Inductor's key does not tell them apart (torch 2.13), and loops
    for 16 numbers that run with vectors of 8 leave out every second one."""
    x, y = torch.randn(100, 64), torch.zeros(100)
    expected = F.mse_loss(Products()(x), y)
    with fresh_cache():
        for capability in ("avx512", "avx2", "default"):
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
            torch.compiler.reset()
            model = Products()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = compile_train_step(model, F.mse_loss, optimizer, level="O0", backend="inductor")
            torch.testing.assert_close(step(x, y).loss, expected)
