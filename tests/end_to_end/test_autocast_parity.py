"""With ``Policy.torch`` the compiled model and torch.autocast agree in every bit, forward and backward, and the
compiled model casts no more often than autocast does."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import Policy, amp_compile
from helpers import training_casts
from networks import BF16_ONLY, NETWORKS

DTYPES = [torch.bfloat16, torch.float16]
#: networks that run in fp16 in every test run: the ops of all others are in one of them; all run with the marker zoo
IN_FP16 = ("conv_bn", "embedding", "masked_attention", "shared_weights", "graph_break", "custom_function", "unet",
           "functional_mix")  # fmt: skip


def outputs_and_gradients(
    run, model: nn.Module, args: tuple[Tensor, ...]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Run once; the flat outputs and the gradient of every parameter and input."""
    args = tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in args)
    out = run(*args)
    flat = [out] if isinstance(out, Tensor) else [o for o in out if isinstance(o, Tensor)]
    loss = sum(o.float().sum() for o in flat)
    loss.backward()
    return flat, [t.grad for t in (*model.parameters(), *args)]


def assert_bit_equal(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            assert a is b, f"value {index}: only one is None"
            continue
        assert a.dtype == b.dtype, f"value {index}: {a.dtype} against autocast's {b.dtype}"
        assert torch.equal(a, b), f"value {index}: largest difference {(a.float() - b.float()).abs().max()}"


def has_lstm(model: nn.Module) -> bool:
    return any(isinstance(m, nn.LSTM) for m in model.modules())


def run_both(model: nn.Module, args: tuple[Tensor, ...], dtype: torch.dtype):
    twin = copy.deepcopy(model)
    fast = amp_compile(model, policy=Policy.torch("cpu", dtype), backend="eager", keep_output_dtypes=False)

    def peer(*xs):
        with torch.autocast("cpu", dtype=dtype):
            return twin(*xs)

    torch.manual_seed(7)
    # autocast's fused oneDNN LSTM is another algorithm: compare with torch's own cells (docs/design.md#capture)
    with torch.backends.mkldnn.flags(enabled=not has_lstm(model)):
        theirs = outputs_and_gradients(peer, twin, args)
        their_casts = training_casts(peer, twin, args)
    torch.manual_seed(7)
    ours = outputs_and_gradients(fast, model, args)
    return fast, ours, theirs, their_casts


def case(name: str, dtype: torch.dtype) -> Any:
    marks = [] if dtype is torch.bfloat16 or name in IN_FP16 else [pytest.mark.zoo]
    return pytest.param(name, dtype, marks=marks, id=f"{name}-{'bf16' if dtype is torch.bfloat16 else 'fp16'}")


@pytest.mark.parametrize(("name", "dtype"), [case(name, dtype) for name in NETWORKS for dtype in DTYPES])
def test_bit_equal_to_autocast_with_no_more_casts(name: str, dtype: torch.dtype) -> None:
    if name in BF16_ONLY and dtype is torch.float16:
        pytest.skip("torch.autocast itself fails on this network in fp16 on CPU")
    torch._dynamo.reset()
    model, args = NETWORKS[name]()
    fast, ours, theirs, their_casts = run_both(model, args, dtype)
    assert_bit_equal(ours[0], theirs[0])
    assert_bit_equal(ours[1], theirs[1])
    assert fast.report().rows, "nothing was captured: equality would mean nothing"
    graphs, our_casts = len(fast.graphs), training_casts(fast, model, args)
    assert len(fast.graphs) == graphs, "another graph was counted than the one that was compared"
    assert our_casts.number <= their_casts.number, f"{our_casts} against {their_casts}"
    assert our_casts.bytes <= their_casts.bytes, f"{our_casts} against {their_casts}"
