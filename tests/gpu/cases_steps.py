"""Whole compiled training steps on device ``cuda``: capture, all passes, two more steps during which the host may not
wait for the device, and the graphs that ran."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import stand_in
import torch
from cuda_rules import violations
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amp_compiler import Policy, compile_train_step, ir
from networks import NETWORKS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LEVELS = ("O1", "O2", "O3", "auto", "torch")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "unfused": lambda p: torch.optim.SGD(p, lr=0.01),
}


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever makes the host wait for the device raises."""
    if stand_in.LIBRARIES:
        with stand_in.watch():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loss_fn(output: Any, targets: Any) -> Tensor:
    found = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    return sum((x.float() ** 2).mean() for x in found)  # type: ignore[return-value]


def compiled(model: nn.Module, level: str, dtype: torch.dtype, optimizer: str, **kwargs: Any) -> Any:
    chosen: Any = {"policy": Policy.torch("cuda", dtype)} if level == "torch" else {"level": level, "dtype": dtype}
    given = {"loss_fn": loss_fn, "backend": "eager", **kwargs}
    return compile_train_step(model, optimizer=OPTIMIZERS[optimizer](model.parameters()), **chosen, **given)


def graph_facts(graphs: list[Any]) -> dict[str, list[str]]:
    """What should not be in a graph for a GPU: values elsewhere, CPU ops, dtypes that CUDA's kernels refuse."""
    elsewhere, cpu, refused = set(), set(), set()
    for graph in graphs:
        for _, inner in ir.all_graphs(graph):
            for node in inner.graph.nodes:
                name = ir.op_name(node) if node.op == "call_function" else node.op
                for found in ir.tensor_outputs(node):
                    if found is not None and found.device.type != "cuda" and found.dim():  # numbers may be anywhere
                        elsewhere.add(f"{node.name}: {name}")
                if any(words in name for words in ("for_cpu", "mkldnn", "onednn", "amp::wide")):
                    cpu.add(name)
                refused.update(violations(node, name))
    return {"elsewhere": sorted(elsewhere), "cpu": sorted(cpu), "refused": sorted(refused)}


def step(network: str, level: str, low: str, optimizer: str = "adamw") -> dict[str, Any]:
    torch.manual_seed(0)
    model, args = NETWORKS[network]()
    model, inputs = model.cuda(), tuple(a.detach().cuda() for a in args)
    run = compiled(model, level, DTYPES[low], optimizer)
    run(inputs)
    stand_in.LAUNCHES.clear()
    with no_waiting():
        run(inputs)
        result = run(inputs)
    tensors = (result.loss, result.skipped, result.scale, result.grad_norm, result.updated, result.loss_finite)
    made = {
        "loss": str(result.loss.dtype), "devices": sorted({t.device.type for t in tensors}),
        "gradients": sorted({f"{p.grad.dtype} {p.grad.device.type}" for p in model.parameters() if p.grad is not None}),
        "one_graph": bool(run.joint_graphs), "launches": sorted(set(stand_in.LAUNCHES)),
        "ops": sorted({ir.op_name(n) for g in run.joint_graphs for n in g.graph.nodes if n.op == "call_function"}),
        "kernels": [str(kernel) for kernel in run.report().kernels],
    }  # fmt: skip
    return {**made, **graph_facts([*run.graphs, *run.joint_graphs])}


class Reads(nn.Module):
    """Reads a value of the device on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * 2 if y.sum() > 0 else y


def reads(model: Callable[[], nn.Module], optimizer: str, **kwargs: Any) -> str:
    """What makes the host wait in a step that should; empty if nothing does."""
    made = model().cuda()
    run = compiled(made, "O2", torch.float16, optimizer, **kwargs)
    inputs = torch.randn(4, 8, device="cuda")
    try:
        if stand_in.LIBRARIES:
            with no_waiting():
                run(inputs)
        else:
            run(inputs)
            with no_waiting():
                run(inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


CASES: dict[str, Callable[[], Any]] = {
    f"{network}-{level}-{low}-{optimizer}": functools.partial(step, network, level, low, optimizer)
    for network in NETWORKS for level in LEVELS for low in DTYPES for optimizer in ("adamw", "sgd")
}  # fmt: skip
CASES |= {
    "fused": functools.partial(reads, lambda: nn.Linear(8, 8), "adamw"),
    "clipped": functools.partial(reads, lambda: nn.Linear(8, 8), "adamw", max_grad_norm=1.0),
    "unfused": functools.partial(reads, lambda: nn.Linear(8, 8), "unfused"),
    "reads": functools.partial(reads, Reads, "adamw"),
}
