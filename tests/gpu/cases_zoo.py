"""Models of ``transformers`` on device ``cuda``: forward and backward at a level, and the graphs that ran."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import stand_in
from cases_steps import DTYPES, graph_facts
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils import _pytree as pytree

from amp_compiler import amp_compile
from amp_compiler.common.errors import CaptureError
from zoo.models import ZOO

#: a number that the model's code puts on the device, torch.tensor(0.0, device="cuda"), is a constant of its graph: on
#: the stand-in a fake, which capture takes for a value that has leaked from tracing
CONSTANT = "a value of the trace became a constant"


def model(name: str, level: str, low: str) -> dict[str, Any]:
    made, kwargs = ZOO[name]()
    made = made.cuda()
    given = pytree.tree_map_only(Tensor, lambda t: t.cuda(), kwargs)
    fast = amp_compile(made, level, dtype=DTYPES[low], backend="eager")
    try:
        out = fast(**given)
    except CaptureError as error:
        if stand_in.LIBRARIES and CONSTANT in str(error):
            return {"stops": "a number that the model's code puts on the device"}
        raise
    except DataDependentOutputException:
        return {"stops": "a value of the device that the model's code reads on the host"}
    tensors = [t for t in pytree.tree_leaves(dict(out)) if isinstance(t, Tensor)]
    sum(t.float().sum() for t in tensors if t.requires_grad).backward()  # type: ignore[union-attr]
    return {
        "devices": sorted({t.device.type for t in tensors}), "graphs": len(fast.graphs),
        "gradients": sorted({str(p.grad.dtype) for p in made.parameters() if p.grad is not None}),
        **graph_facts(fast.graphs),
    }  # fmt: skip


CASES: dict[str, Callable[[], Any]] = {
    f"{name} {level} {low}": functools.partial(model, name, level, low)
    for name in ZOO for level in ("O1", "O2", "auto") for low in DTYPES
}  # fmt: skip
