"""The form of a converted program that runs in memory: with our kernels where the CPU has no low-precision units."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from .. import ir
from ..capture.program import Frame, functional, rebuild, weights_of
from ..common.torch_names import no_autocast
from ..ir.weights import Weight
from ..kernels.cpu import runs_wide
from ..passes import order
from ..policy import Policy
from ..rewrite.base import Context
from ..rewrite.records import Record
from ..runtime.prepare import prepare_kernels


class Running:
    """A module made from a program at the first call. The program and its tensors are not changed."""

    def __init__(
        self, program: ExportedProgram, policy: Policy, disabled: tuple[str, ...], cache_weights: bool,
        history: list[Record],
    ) -> None:  # fmt: skip
        self.cached_bytes = 0
        if _wants_kernels(program, policy):
            program = self._lowered(program, policy, disabled, cache_weights, history)
        self._module = program.module()

    def _lowered(
        self, program: ExportedProgram, policy: Policy, disabled: tuple[str, ...], cache_weights: bool,
        history: list[Record],
    ) -> ExportedProgram:  # fmt: skip
        lowered = functional(program)
        gm, weights = lowered.graph_module, weights_of(lowered)
        assert isinstance(gm, fx.GraphModule)
        prepare_kernels(gm, policy)
        before = {n.name for n in gm.graph.nodes if n in weights}
        ctx = Context(policy, weights=weights, caches_weights=cache_weights)
        order.build(disabled).run_converted.run(gm, ctx, history, graph="run", after="lowering")
        self.cached_bytes = sum(
            ir.nbytes(n.meta["val"]) for n in gm.graph.nodes if n in weights and n.name not in before
        )

        def make(node: fx.Node, weight: Weight) -> torch.Tensor:
            return weight.make().detach()

        return rebuild(Frame.of(lowered), gm.graph, make, weights)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad(), no_autocast():
            return self._module(*args, **kwargs)


def _wants_kernels(program: ExportedProgram, policy: Policy) -> bool:
    """True if some low value of the graph is on a CPU that computes low-precision products in fp32."""
    if policy.autocast_device is not None:
        return False
    found = {
        v.dtype for _, inner in ir.all_graphs(program.graph_module) for n in inner.graph.nodes
        for v in ir.tensor_outputs(n) if v is not None and v.dtype in ir.LOW_DTYPES and v.device.type == "cpu"
    }  # fmt: skip
    return any(runs_wide(dtype) for dtype in found)
