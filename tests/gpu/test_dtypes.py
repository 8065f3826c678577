"""``Policy.torch("cuda")`` gives every op of torch's own database the dtypes that AutocastCUDA gives it.

Autocast's kernels for CUDA run here on fakes, so the comparison is with the torch that is installed, not with a list.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu.fake_cuda import autocast_dtypes
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from amp_compiler import BannedOpError, Policy
from amp_compiler.capture.lower import decompositions
from helpers import FORWARD, context, fakes

#: why autocast itself cannot say on a fake: the message, or the class, of what it raises
NOT_ON_FAKES = (
    "not linked with support for cuda", "not compiled with CUDA", "Jiterator", "CSR tensors do not have",
    "expected tensor_indices_or_sections to be on cpu", "NVIDIA driver", "CUDA driver",
)  # fmt: skip
#: ops that autocast breaks: it passes low-precision operands to an op that refuses them
AUTOCAST_FAILS = ("linalg.pinv",)
#: ops that fakes cannot run before they are taken apart, as autocast does (torch 2.15)
WITHOUT_SHAPE = ("nn.functional.ctc_loss",)
PARTS = 8  # with two, a call of every op took ten times as long: nothing is collected inside of a part
# The database calls what is deprecated too.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet_fakes")]


def our_dtypes(op: Any, args: tuple[Any, ...], kwargs: Any, policy: Policy, table: Any) -> list[torch.dtype]:
    """The dtypes that the forward passes give to the results of one op."""
    flat, spec = pytree.tree_flatten((args, kwargs))

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        given, named = pytree.tree_unflatten([next(left) if isinstance(x, Tensor) else x for x in flat], spec)
        return tuple(x for x in pytree.tree_leaves(op(*given, **named)) if isinstance(x, Tensor))

    mode, given = fakes(*(x.detach() for x in flat if isinstance(x, Tensor)))
    with mode, torch.no_grad():
        gm = make_fx(call, decomposition_table=table, pre_dispatch=True)(*given)
    gm.graph.eliminate_dead_code()
    ctx = context(policy=policy, keep=False)
    for step in FORWARD:
        step.run(gm, ctx)
    results = next(iter(reversed(gm.graph.nodes))).args[0]
    return [node.meta["val"].dtype for node in results]


def samples(op: Any, number: int) -> Iterator[Any]:
    made = iter(op.sample_inputs("cpu", torch.float32, requires_grad=False))
    found = list(itertools.islice(made, number))
    if hasattr(made, "close"):
        made.close()  # a generator that is freed later switches gradients on, which a trace would record
    yield from (((sample.input, *sample.args), sample.kwargs) for sample in found)


def compare(ops: list[Any], dtype: torch.dtype, number: int) -> tuple[int, list[str]]:
    """How many calls agree, and those that do not."""
    policy = Policy.torch("cuda", dtype)
    table, same, different = decompositions(policy), 0, []
    for op in ops:
        for args, kwargs in samples(op, number):
            name = f"{op.name} {op.variant_test_name} {kwargs}"
            try:
                theirs: Any = autocast_dtypes(op.op, args, kwargs, dtype)
            except (DataDependentOutputException, DynamicOutputShapeException):
                continue
            except (RuntimeError, AssertionError) as error:
                if any(words in str(error) for words in NOT_ON_FAKES) or op.name in AUTOCAST_FAILS:
                    continue
                theirs = "banned" if "unsafe to autocast" in str(error) else error
            try:
                ours: Any = our_dtypes(op.op, args, kwargs, policy, table)
            except BannedOpError:
                ours = "banned"
            except DynamicOutputShapeException:
                if op.name not in WITHOUT_SHAPE:
                    raise
                continue
            same += ours == theirs
            different += [] if ours == theirs else [f"{name}: {ours}, autocast {theirs}"]
    return same, different


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Some of torch's samples leave suspended generators in cycles. Collected while an op is traced, one sets back
    whether gradients are on, and the trace records it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@functools.cache
def all_ops() -> list[Any]:
    """The ops of torch's database that take fp32. Importing it freezes the flags of ``torch.backends`` for the process,
    which other tests set, and draws random numbers."""
    flag, seed = "__allow_nonbracketed_mutation_flag", torch.get_rng_state()
    held = torch.backends.flags_frozen.__globals__  # the module itself is replaced by an object
    before = held[flag]
    try:
        op_db = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
        from torch.testing._internal import common_utils
        from torch.testing._internal.opinfo import core

        # The samples look through all frames for the test of torch's own that they are in, and here there is none.
        common_utils.extract_test_fn = core.extract_test_fn = lambda: None  # type: ignore[assignment]
        gc.collect()
        gc.freeze()  # the database stays: collecting after each part need not walk it
    finally:
        held[flag] = before
        torch.set_rng_state(seed)
    return [op for op in op_db if torch.float32 in op.dtypes]


@pytest.mark.parametrize("part", range(PARTS))
def test_a_call_of_every_op_has_autocasts_dtypes(part: int) -> None:
    ops = all_ops()[part::PARTS]
    same, different = compare(ops, torch.float16, 1)
    assert different == []
    assert same > 0.85 * len(ops)  # the rest cannot run on fakes


@pytest.mark.zoo
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("part", range(PARTS))
def test_all_calls_of_every_op_have_autocasts_dtypes(part: int, dtype: torch.dtype) -> None:
    ops = all_ops()[part::PARTS]
    same, different = compare(ops, dtype, 1000)
    assert different == []
    assert same > len(ops)
