"""Every backend computes what the graph says: the same numbers, and no rounding lost on the way."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from amp_compiler import AmpModule, amp_compile

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def compiled(target: Any, backend: str, level: str = "O2", **options: Any) -> AmpModule:
    return amp_compile(target, level, **{"dtype": BF16, "backend": backend} | options)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))


def run(model: nn.Module, fast: Any) -> list[Tensor]:
    """The output and every gradient."""
    model.zero_grad()
    x = numbers(6, 16).requires_grad_()
    out = fast(x)
    out.square().mean().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def by_hand(x: Tensor) -> Tensor:
    """A rounding that the author wrote, and one more in a chain that a fusing backend could keep in fp32."""
    return x.to(BF16).to(torch.float32) * 3


def chain(x: Tensor) -> Tensor:
    """FOLLOW ops, low at O2: each one rounds its result.

    The constants are bf16 values: torch's own CPU kernels round some scalars to the tensor's dtype (add) and
    some not (mul), and Inductor none, so other constants would compare torch with torch.
    """
    y = x * 1.0078125 + 0.25
    z = y * y - x
    return (z + y) * 0.75


def chain_in_steps(x: Tensor) -> Tensor:
    """``chain`` with its roundings written out: fp32 inside each op, one rounding after it."""

    def low(value: Tensor) -> Tensor:
        return value.to(BF16).float()

    x = low(x)
    y = low(low(x * 1.0078125) + 0.25)
    z = low(low(y * y) - x)
    return low(low(z + y) * 0.75)


# values whose rounding to bf16 matters: all 8 bits of the mantissa and more are in use
PROBES = 1 + torch.arange(1, 2049, dtype=torch.float32) / 2053


# ------------------------------------------------------------------------------------------------- eager


def test_the_eager_backend_keeps_every_rounding():
    assert torch.equal(compiled(by_hand, "eager", "O0")(PROBES), by_hand(PROBES))
    assert torch.equal(compiled(by_hand, "eager", "O1")(PROBES), by_hand(PROBES))
    assert torch.equal(compiled(chain, "eager")(PROBES), chain_in_steps(PROBES))


def test_a_rounding_by_hand_survives_folding():
    """fp32 → bf16 → fp32 is no redundant pair: it rounds, also between two ops that are low anyway."""

    def code(x: Tensor) -> Tensor:
        y = F.linear(x, x).to(BF16).float()
        return F.linear(y, x)

    fast = compiled(code, "eager", "O1")
    x = numbers(8, 8)
    low = x.to(BF16)
    assert torch.equal(fast(x), F.linear(F.linear(low, low), low).float())
    plain = compiled(code, "eager", "O1", disable_passes=["fold_casts"])
    assert torch.equal(fast(x), plain(x))


def test_auto_is_eager_on_the_cpu(monkeypatch):
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Inductor was called")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", never)
    model = network()
    ours, theirs = run(model, compiled(model, "auto")), run(model, compiled(model, "eager"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "frozen"])
def test_without_gradients_the_passes_after_autodiff_run_too(mode):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fast = compiled(model, "eager", "O1")
    x = numbers(3, 4)
    if mode == "frozen":
        model.requires_grad_(False)
        out = fast(x)
    else:
        with getattr(torch, mode)():
            out = fast(x)
    folded = [r for r in fast.history if r.name == "fold_casts"]
    assert [r.graph for r in folded] == ["inference"]
    model.requires_grad_(True)
    assert torch.equal(fast(x).detach(), out)
    assert [r.graph for r in fast.history if r.name == "fold_casts"] == ["inference", "joint"]


def test_inference_folds_as_training_does():
    """linear → linear: the casts between the two are a round trip, gone in both graphs."""
    fast = compiled(nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)), "eager", "O1",
                    disable_passes=[])  # fmt: skip
    with torch.no_grad():
        fast(numbers(3, 4))
    (before,) = [r for r in fast.history if r.name == "insert_casts"]
    (after,) = [r for r in fast.history if r.name == "fold_casts"]
    assert after.casts <= before.casts
    assert fast.report().casts == after.casts
    # x, two weights, two biases go down, the result goes up
    assert after.casts <= 6


# ---------------------------------------------------------------------------------------------- inductor


def test_inductor_agrees_with_eager():
    model = network()
    plain, fast = compiled(model, "eager"), compiled(model, "inductor")
    theirs = run(model, plain)
    ours = run(model, fast)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        # each value went through a few bf16 roundings in another order of sums: some ulps of the largest
        assert (a - b).abs().max() <= 4 * torch.finfo(BF16).eps * b.abs().max()
    assert fast.report().by_precision == plain.report().by_precision
    assert [r.graph for r in fast.history if r.name == "fold_casts"] == ["joint"]


def test_inductor_drops_no_rounding():
    """A rounding by hand, and a chain's roundings that only the graph asks for."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return by_hand(x), chain(x)

    fast = compiled(both, "inductor")
    with torch.no_grad():
        rounded, chained = fast(PROBES)
    assert torch.equal(rounded, compiled(by_hand, "eager")(PROBES))
    assert torch.equal(chained, chain_in_steps(PROBES))
    assert [r.graph for r in fast.history if r.name == "fold_casts"] == ["inference"]


def test_inductor_rounds_gradients_as_eager_does():
    def run_chain(backend: str) -> tuple[Tensor, Tensor]:
        x = PROBES.clone().requires_grad_()
        out = compiled(lambda x: chain(by_hand(x)), backend)(x)
        out.sum().backward()
        return out.detach(), x.grad

    for ours, theirs in zip(run_chain("inductor"), run_chain("eager"), strict=True):
        assert torch.equal(ours, theirs)


def test_inductor_rounds_every_number_as_torch_does():
    """Whole vectors and a remainder; numbers between two of bf16's, in the middle, next to it, infinite and NaN."""
    high, low = torch.arange(2**16) << 16, torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (high[:, None] + low).flatten().to(torch.uint32).view(torch.float32)
    x = torch.cat([x, x[-5:]])

    def fn(x: Tensor) -> Tensor:
        return x.to(BF16).float().abs()

    fast = compiled(fn, "inductor")
    with torch.no_grad():
        found, sources = run_and_get_code(lambda: fast(x))
    expected = fn(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
    assert not [source for source in sources if PACKED_AND_UNPACKED.search(source)]


#: a vector that is converted to bf16, and back at once
PACKED_AND_UNPACKED = re.compile(
    r"auto (\w+) = at::vec::convert<at::BFloat16,\d,float,\d>\(\w+\);\s*auto \w+ = at::vec::convert<float[^(]*\(\1\)"
)


class Windows(nn.Module):
    """Convolutions of every kind, two of which read the same images, and what Inductor fuses between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1, bias=False)
        self.grouped, self.back = nn.Conv2d(8, 8, 3, 2, 1, groups=4), nn.ConvTranspose2d(8, 2, 2, 2)
        self.line, self.space = nn.Conv1d(2, 2, 3), nn.Conv3d(1, 2, (1, 3, 3), padding=(0, 1, 1))
        with torch.no_grad():
            for number, weight in enumerate(self.parameters()):  # whole numbers, of which bf16 holds the first half
                weight.copy_(torch.randint(-400, 400, weight.shape, generator=torch.Generator().manual_seed(number)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.first(x)
        y = F.relu(first + self.beside(x)) * 2.0**-14
        grouped = self.grouped(y.round())
        flat = self.back(grouped)
        return first, grouped, flat, self.line(flat[:, :, 0] * 2.0**-20), self.space(x[:, None, 0].unsqueeze(2))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_inductor_convolves_low_operands_in_fp32(monkeypatch, dtype):
    """In inference it gets convolutions in fp32 between two roundings, which it lays out and fuses. Sums of whole
    numbers are exact, so every rounding shows."""
    monkeypatch.setenv("AMP_CPU_KERNELS", "wide")
    x = torch.randint(-9, 10, (2, 3, 12, 12), generator=torch.Generator().manual_seed(0)).float()
    model = Windows().eval()
    if dtype is torch.float16:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_((weight / 8).round())
    plain, fast = (compiled(model, backend, dtype=dtype) for backend in ("eager", "inductor"))
    with torch.no_grad():
        expected, found = plain(x), fast(x)
        names = [event.name for event in events(lambda: fast(x))]
    assert "amp::wide_convolution" not in names
    assert "aten::convolution" in names
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.isfinite().all()
        assert theirs.count_nonzero() > 10
        assert torch.equal(ours, theirs)


def events(code: Any) -> list[Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        code()
    return list(recorded.events())


def test_inductor_holds_low_images_for_the_backward(monkeypatch):
    """A graph with convolutions to differentiate keeps the kernels that read low images."""
    monkeypatch.setenv("AMP_CPU_KERNELS", "wide")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 64, 2))
    fast, x = compiled(model, "inductor", dtype=torch.float16), numbers(4, 3, 12, 12)
    fast(x).sum().backward()
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        out = fast(x)
    images = [t for t in held if t.dim() == 4 and t.shape[0] == 4 and t.data_ptr() != x.data_ptr()]
    assert images
    assert {t.dtype for t in images} == {torch.float16}
    names = [event.name for event in events(lambda: out.sum().backward())]
    assert names.count("amp::wide_convolution_backward") == 2
