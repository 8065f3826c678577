"""What must hold on device ``cuda``: parity with ``torch.autocast``, the kernels, skipped steps, NCCL, conversion.

On a GPU values are compared; on the stand-in for one they do not exist, and dtypes, shapes, devices and launches are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import stand_in
import torch
import torch.nn.functional as F
from attention_calls import CALLS, CAPABILITIES, chosen
from cases_inductor import sources
from cases_steps import DTYPES, OPTIMIZERS, compiled, graph_facts, loss_fn, no_waiting
from torch import Tensor, nn

from amp_compiler import DataParallel, Policy, all_finite, amp_compile, convert_model, ir
from amp_compiler.kernels.cast_matmul import reference
from amp_compiler.kernels.unscale import unscale_
from networks import NETWORKS

REAL = not stand_in.LIBRARIES
#: products: a, b, with a bias; K split in pieces, a batch, sizes that are not aligned, turned operands
SHAPES = {
    "square": ((256, 256), (256, 256)), "few rows": ((16, 8192), (8192, 1024)), "batch": ((8, 64, 32), (8, 32, 64)),
    "ragged": ((33, 17), (17, 65)), "layer": ((8192, 768), (768, 3072)),
}  # fmt: skip


def differences(ours: list[Any], theirs: list[Any]) -> list[str]:
    """Where two lists of tensors differ: in dtype, shape or device, and on a GPU in any bit."""
    found = []
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            found += [] if a is b else [f"{index}: only one is None"]
        elif (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
            found.append(f"{index}: {a.dtype} {list(a.shape)} {a.device}, {b.dtype} {list(b.shape)} {b.device}")
        elif REAL and not torch.equal(a, b):
            found.append(f"{index}: by {(a.double() - b.double()).abs().max().item()}")
    return found


def parity(network: str, low: str) -> list[str]:
    """Where outputs and gradients differ from those of ``torch.autocast("cuda")``."""
    model, args = NETWORKS[network]()
    model = model.cuda()
    twin = copy.deepcopy(model)
    fast = amp_compile(model, policy=Policy.torch("cuda", DTYPES[low]), backend="eager", keep_output_dtypes=False)

    def run(one: Any, of: nn.Module) -> list[Any]:
        given = [a.detach().cuda().requires_grad_(a.requires_grad) for a in args]
        out = one(*given)
        outputs = [out] if isinstance(out, Tensor) else [o for o in out if isinstance(o, Tensor)]
        sum(o.float().sum() for o in outputs).backward()  # type: ignore[union-attr]
        return [*outputs, *(t.grad for t in (*of.parameters(), *given))]

    def peer(*xs: Tensor) -> Any:
        # A CPU build of torch has no cuDNN, whose recurrent layers eager mode calls: without it they are cells.
        with torch.backends.cudnn.flags(enabled=REAL), torch.autocast("cuda", dtype=DTYPES[low]):
            return twin(*xs)

    return differences(run(fast, model), run(peer, twin))


def scaler(low: str) -> list[str]:
    """Where three updates differ from those of ``torch.autocast`` with a ``GradScaler``."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 8)).cuda()
    twin = copy.deepcopy(model)
    step = compiled(model, "torch", DTYPES[low], "adamw")
    theirs, grad_scaler = OPTIMIZERS["adamw"](twin.parameters()), torch.amp.GradScaler("cuda")
    for number in range(3):
        inputs = torch.randn(8, 16, device="cuda")
        if REAL and number == 1:
            inputs[0, 0] = float("inf")  # both skip this update
        step(inputs)
        theirs.zero_grad()
        with torch.autocast("cuda", dtype=DTYPES[low]):
            loss = loss_fn(twin(inputs), None)
        grad_scaler.scale(loss).backward()
        grad_scaler.step(theirs)
        grad_scaler.update()
    return differences(list(model.parameters()), list(twin.parameters()))


def product(shape: str, low: str) -> dict[str, Any]:
    """Our product of fp32 operands against its definition, and against a cast and cuBLAS."""
    (left, right), dtype = SHAPES[shape], DTYPES[low]
    a, b = torch.randn(left, device="cuda"), torch.randn(right, device="cuda")
    bias = torch.randn(right[-1], device="cuda") if len(left) == 2 else None
    stand_in.LAUNCHES.clear()
    result = torch.ops.amp.cast_matmul(a, b, bias, dtype, torch.float32)
    launches = list(stand_in.LAUNCHES)
    wanted = reference(a, b, bias, dtype, torch.float32)
    blas = (torch.bmm if len(left) == 3 else torch.mm)(a.to(dtype), b.to(dtype))
    answer: dict[str, Any] = {
        "like": (result.dtype, result.shape, result.device) == (wanted.dtype, wanted.shape, wanted.device),
        "launches": launches,
    }
    if REAL:
        sums = a.to(dtype).double().abs() @ b.to(dtype).double().abs()
        bound = (left[-1] + 1) * 2.0**-24 * (sums + (0 if bias is None else bias.double().abs()))
        exact = a.to(dtype).double() @ b.to(dtype).double() + (0 if bias is None else bias.to(dtype).double())
        answer["exact"] = bool(((result.double() - exact).abs() <= bound + exact.abs() * 2.0**-24).all())
        low_result = torch.ops.amp.cast_matmul(a, b, None, dtype, dtype)
        answer["blas"] = (low_result.float() - blas.float()).abs().max().item() <= torch.finfo(dtype).eps * float(
            sums.max()
        )
    return answer


def gradients() -> dict[str, Any]:
    """Checking and unscaling a long list of gradients: one launch per dtype, and no waiting."""
    dtypes = (torch.float32, *DTYPES.values())
    grads = [torch.randn(n, device="cuda", dtype=d) for n in (1, 1000, 70000) for d in dtypes]
    before = [g.clone() for g in grads]
    found, scale = torch.zeros((), device="cuda"), torch.full((), 0.5, device="cuda")
    with no_waiting():
        stand_in.LAUNCHES.clear()
        unscale_(grads, scale, found)
        launches = list(stand_in.LAUNCHES)
        finite = all_finite(grads)
    answer: dict[str, Any] = {"launches": launches, "finite": [str(finite.dtype), finite.device.type]}
    if REAL:
        wanted = [(g.float() * 0.5).to(g.dtype) for g in before]
        answer["values"] = differences(grads, wanted) == [] and bool(finite) and not bool(found)
    return answer


def skip() -> dict[str, Any]:
    """An update with infinite gradients is skipped, and the host does not wait to find out."""
    model = nn.Linear(8, 8).cuda()
    step = compiled(model, "O2", torch.float16, "adamw")
    good, bad = torch.randn(4, 8, device="cuda"), torch.full((4, 8), float("inf"), device="cuda")
    step(good)
    before = [p.detach().clone() for p in model.parameters()]
    with no_waiting():
        result = step(bad)
    answer: dict[str, Any] = {"skipped": [str(result.skipped.dtype), result.skipped.device.type]}
    if REAL:
        answer["kept"] = bool(result.skipped) and all(
            torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
        )
    return answer


def data_parallel() -> dict[str, Any]:
    """A step whose gradients are averaged by NCCL (here: by a group that exchanges nothing)."""
    import torch.distributed as dist

    if REAL:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
        step = compiled(model, "O2", torch.float16, "adamw", parallel=DataParallel())
        inputs = torch.randn(4, 8, device="cuda")
        step(inputs)
        with no_waiting():
            step(inputs)
        names = {ir.op_name(n) for g in step.joint_graphs for n in g.graph.nodes if n.op == "call_function"}
        return {"reduces": any("all_reduce" in name for name in names), **graph_facts(step.joint_graphs)}
    finally:
        dist.destroy_process_group()


def convert(network: str) -> dict[str, Any]:
    """A converted model on the device. Conversion reads the weights, so without a GPU it is done on the CPU and the
    program is moved, as a user may do it too."""
    model, args = NETWORKS[network]()
    model, given = model.eval(), tuple(a.detach() for a in args)
    moved = tuple(a.cuda() for a in given)
    if REAL:
        program = convert_model(model.cuda(), moved, dtype=torch.float16).exported_program
    else:
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(convert_model(model, given, dtype=torch.float16).exported_program, "cuda")
    out = program.module()(*moved)
    answer = {"out": [str(out.dtype), out.device.type], **graph_facts([program.graph_module])}
    if REAL:
        with torch.no_grad():
            answer["near"] = bool(torch.allclose(out, model(*moved), rtol=2e-2, atol=2e-2))
    return answer


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.mix, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(16, 16, device=x.device, dtype=query.dtype) if self.kind == "masked" else None
        y = F.scaled_dot_product_attention(query, key, value, mask, is_causal=self.kind == "causal")
        return self.out(y.transpose(1, 2).reshape(2, 16, 32))


def attention(kind: str, level: str, capability: int) -> dict[str, Any]:
    """Which kernel of torch's attention runs, with dtypes that it takes, forward and backward. A GPU is what it is; the
    stand-in for one has the compute capability that is asked for."""
    step = compiled(Attention(kind).cuda(), level, torch.float16, "adamw")
    with contextlib.nullcontext() if REAL else stand_in.capability(capability):
        step(torch.randn(2, 16, 32, device="cuda"))
    names = {ir.op_name(n) for g in step.joint_graphs for n in g.graph.nodes if n.op == "call_function"}
    return {"kernels": sorted(n for n in names if "attention" in n), **graph_facts(step.joint_graphs)}


def which_attention(capability: int) -> dict[str, dict[str, str]]:
    """Which kernel torch takes for each call of ``attention_calls``, on a GPU; none of them runs."""
    if REAL:
        major, minor = torch.cuda.get_device_capability()
        return {f"{major}{minor}": {str(call): chosen(call) for call in CALLS}}
    with stand_in.capability(capability):
        return {str(capability): {str(call): chosen(call) for call in CALLS}}


def layer(rows: int) -> dict[str, Any]:
    """What a report says of the kernels of a linear layer, and what was launched."""
    model = nn.Linear(768, 3072).cuda()
    fast = amp_compile(model, "O2", dtype=torch.float16, backend="eager")
    stand_in.LAUNCHES.clear()
    with torch.no_grad():
        fast(torch.randn(rows, 768, device="cuda"))
    return {"kernels": [str(kernel) for kernel in fast.report().kernels], "launches": list(stand_in.LAUNCHES)}


def benchmark() -> int:
    """The timed part of ``make bench-gpu``, small: how many rows it gives."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # before this folder, which has a harness too
    from gpu_timed import timed

    from networks import BertLike

    rows: list[Any] = []
    run: Any = SimpleNamespace(add=rows.append, table=lambda *args: None)
    small = BertLike(layers=1, hidden=32, heads=4, intermediate=64, vocab=200, seq=8)
    with sources():
        timed(run, 1, {"layer": (16, 32, 32)}, [10, 20], small, seconds=0.0)
    return len(rows)


CASES: dict[str, Callable[[], Any]] = {
    **{f"parity {n} {d}": functools.partial(parity, n, d) for n in NETWORKS for d in DTYPES},
    **{f"scaler {d}": functools.partial(scaler, d) for d in DTYPES},
    **{f"product {s} {d}": functools.partial(product, s, d) for s in SHAPES for d in DTYPES},
    **{f"convert {n}": functools.partial(convert, n) for n in NETWORKS},
    **{f"attention {k} {a} {c}": functools.partial(attention, k, a, c) for k in ("plain", "causal", "masked")
       for a in ("O1", "O2", "O3", "auto", "torch", "O0") for c in CAPABILITIES},
    "layer of 16 rows": functools.partial(layer, 16), "layer of 65536 rows": functools.partial(layer, 65536),
    "gradients": gradients, "skip": skip, "data parallel": data_parallel, "benchmark": benchmark,
    **{f"which attention {c}": functools.partial(which_attention, c) for c in CAPABILITIES},
}  # fmt: skip
