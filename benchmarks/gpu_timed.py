"""What ``gpu.py`` times where there is a GPU: products, gradients and training steps, with the peers beside ours.

Products: ours, which rounds fp32 operands as it loads them, beside a cast and cuBLAS. Gradients: our multi-tensor
kernel beside torch's foreach kernel. Steps: ours, by each backend, beside ``torch.autocast`` with a ``GradScaler``,
the same under ``torch.compile``, and fp32. Every sample ends with a synchronization.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Row, Run, interleave, ms, sampled, spread
from networks import BertLike

Cases = dict[str, Callable[[], object]]
LOW = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def waiting(run: Callable[[], object]) -> Callable[[], None]:
    """The same, until the device is done."""

    def waits() -> None:
        run()
        torch.cuda.synchronize()

    return waits


def products(shape: tuple[int, int, int], dtype: torch.dtype) -> Cases:
    """The forward of a linear layer: low activations, an fp32 weight."""
    from amp_compiler.kernels import cast_matmul as _defines  # noqa: F401

    rows, inputs, outputs = shape
    x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
    weight = torch.randn(outputs, inputs, device="cuda")
    low = weight.to(dtype)
    return {
        "ours": lambda: torch.ops.amp.cast_matmul(x, weight.t(), None, dtype, dtype),
        "cast and cuBLAS": lambda: x @ weight.to(dtype).t(),
        "cuBLAS, cast before": lambda: x @ low.t(),
    }


def gradients(sizes: Sequence[int]) -> Cases:
    from amp_compiler.kernels.multi_tensor_triton import unscale_

    grads = [torch.randn(size, device="cuda") for size in sizes]
    found, scale = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    foreach: Any = torch._amp_foreach_non_finite_check_and_unscale_
    return {
        "ours": lambda: unscale_(grads, scale, found),
        "foreach": lambda: foreach(grads, found.view(1), scale),
    }


def steps(model: nn.Module, ids: Tensor, targets: Tensor, dtype: torch.dtype) -> Cases:
    from amp_compiler import compile_train_step

    def optimizer(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(of.parameters(), lr=1e-4, fused=True)

    def ours(backend: str) -> Callable[[], object]:
        own = copy.deepcopy(model)
        step = compile_train_step(own, F.cross_entropy, optimizer(own), "O2", dtype=dtype, backend=backend)
        return lambda: step(ids, targets)

    def autocast(enabled: bool, compiled: bool) -> Callable[[], object]:
        own = copy.deepcopy(model)
        update, scaler = optimizer(own), torch.amp.GradScaler("cuda", enabled=enabled)
        call = torch.compile(own) if compiled else own

        def run() -> None:
            update.zero_grad()
            with torch.autocast("cuda", dtype=dtype, enabled=enabled):
                loss = F.cross_entropy(call(ids), targets)
            scaler.scale(loss).backward()
            scaler.step(update)
            scaler.update()

        return run

    return {
        "ours, eager": ours("eager"), "ours, Inductor": ours("inductor"), "autocast": autocast(True, False),
        "autocast, torch.compile": autocast(True, True), "fp32": autocast(False, False),
    }  # fmt: skip


def timed(run: Run, rounds: int, layers: Mapping[str, tuple[int, int, int]], sizes: Sequence[int],
          model: BertLike | None = None, seconds: float = 0.2) -> None:  # fmt: skip
    """Time everything, and show the median of each case beside ours."""
    made: dict[str, Callable[[], Cases]] = {}
    for name, dtype in LOW.items():
        made |= {f"{layer}, {name}": lambda s=shape, d=dtype: products(s, d) for layer, shape in layers.items()}
    made["gradients of BERT-base"] = lambda: gradients(sizes)
    model = (model or BertLike(layers=12, hidden=768, heads=12, intermediate=3072, vocab=30522, seq=128)).cuda()
    ids, targets = torch.randint(100, (32, model.position.num_embeddings)).cuda(), torch.randint(4, (32,)).cuda()
    for name, dtype in LOW.items():
        made[f"a step of BERT, {name}"] = lambda d=dtype: steps(model, ids, targets, d)
    table = []
    for subject, make in made.items():
        cases = {name: sampled(waiting(case), seconds) for name, case in make().items()}
        found = interleave(cases, rounds)
        first = spread(next(iter(found.values()))).median
        for name, samples in found.items():
            run.add(Row({"what": "timed", "subject": subject, "variant": name}, samples={"seconds": samples}))
            middle = spread(samples).median
            table.append([subject, name, ms(middle), f"{middle / first:.2f}"])
    run.table(f"timed on {torch.cuda.get_device_name()}", ["", "variant", "ms", "of the first"], table)
