"""A run by two ranks beside its plan; ``test_plan.py`` says what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_compiler import DataParallel, Policy, Sharded, compile_train_step
from amp_compiler.parallel.plan import plan, traffic
from networks import BertLike


def compare(parallel: Any, way: str, keep: bool = False) -> dict[str, Any]:
    model, ids = BertLike(2, 32, 2, 64), torch.zeros(2, 8, dtype=torch.long)
    found = plan(
        model, (ids,), None, policy=Policy("O2", torch.bfloat16), ranks=2, parallel=way, reshard_after_forward=not keep
    )
    step = compile_train_step(
        model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16,
        loss_scaler=None, parallel=parallel, disable_passes=["fuse_cast_matmul", "lower_kernels"],
    )  # fmt: skip
    step(ids, torch.zeros(2, dtype=torch.long))
    run = [[t.kind, t.dtype, t.count, t.bytes] for t in traffic(step.joint_graphs[-1])]
    return {"run": run, "planned": [[t.kind, t.dtype, t.count, t.bytes] for t in found.columns[0].traffic]}


CASES: dict[str, Callable[[], Any]] = {
    "data": lambda: compare(DataParallel(), "data"),
    "sharded": lambda: compare(Sharded(), "sharded"),
    "kept": lambda: compare(Sharded(reshard_after_forward=False), "sharded", keep=True),
}
