"""Models of ``transformers`` on device ``cuda``: a whole training step each, and the graphs that ran."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from cases_steps import DTYPES, compiled, graph_facts, no_waiting
from stand_in import HostWaits
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils import _pytree as pytree

from zoo.models import ZOO


def model(name: str, level: str, low: str) -> dict[str, Any]:
    """Two training steps; the second may not make the host wait, unless the model's own code does."""
    made, kwargs = ZOO[name]()
    made = made.cuda()
    given = pytree.tree_map_only(Tensor, lambda t: t.cuda(), kwargs)
    run = compiled(made, level, DTYPES[low], "adamw", loss_fn=_loss)
    try:
        run(given)
    except DataDependentOutputException:
        return {"stops": "a value of the device that the model's code reads on the host"}
    try:
        with no_waiting():
            run(given)
        waits = ""
    except (HostWaits, RuntimeError) as error:
        waits = f"{type(error).__name__}: {error}"
    result = run(given)
    return {
        "devices": sorted({t.device.type for t in (result.loss, result.skipped, result.scale)}), "waits": waits,
        "graphs": len(run.graphs), "one_graph": bool(run.joint_graphs),
        "gradients": sorted({str(p.grad.dtype) for p in made.parameters() if p.grad is not None}),
        **graph_facts([*run.graphs, *run.joint_graphs]),
    }  # fmt: skip


def _loss(output: Any, targets: Any) -> Tensor:
    found = [t for t in pytree.tree_leaves(dict(output)) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack([t.float().mean() for t in found if t.requires_grad]).sum()


CASES: dict[str, Callable[[], Any]] = {
    f"{name} {level} {low}": functools.partial(model, name, level, low)
    for name in ZOO for level in ("O1", "O2", "auto") for low in DTYPES
}  # fmt: skip
