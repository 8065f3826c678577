"""The form of a converted program that runs in memory: with our kernels where they are faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from .. import ir
from ..capture import recurrent
from ..capture.program import Frame, functional, rebuild, weights_of
from ..capture.straight import straight_line
from ..common.torch_names import no_autocast, pytree
from ..ir.weights import Weight
from ..kernels.cpu import any_runs_wide
from ..passes import order
from ..policy import Policy
from ..rewrite.base import Context
from ..rewrite.records import Record
from ..runtime.prepare import prepare_kernels

REMEMBERED = 256  # sizes of inputs whose check is not repeated


class Running:
    """A module made from a program at the first call. The program and its tensors are not changed."""

    def __init__(
        self, program: ExportedProgram, policy: Policy, disabled: tuple[str, ...], cache_weights: bool,
        history: list[Record],
    ) -> None:  # fmt: skip
        self.cached_bytes = 0
        if _wants_kernels(program, policy):
            program = self._lowered(program, policy, disabled, cache_weights, history)
        self._module: Any = program.module()
        self._graph = self._without_checks()
        self._accepted: set[Any] = set()  # what `_module` has checked, of `_sizes`

    def _without_checks(self) -> Callable[[list[Any]], Any] | None:
        """Return a function that runs the module's graph on a list of its inputs, for inputs that it would accept.
        torch 2.13: a program's module flattens its inputs three times and calls its guards as a module, which takes
        longer than a small layer."""
        gm = ir.copy_graph(self._module)
        for node in list(gm.graph.nodes):
            if node.op == "call_module" and node.target == "_guards_fn":
                gm.graph.erase_node(node)
        return straight_line(gm)

    def _lowered(
        self, program: ExportedProgram, policy: Policy, disabled: tuple[str, ...], cache_weights: bool,
        history: list[Record],
    ) -> ExportedProgram:  # fmt: skip
        own = "lower_kernels" not in disabled
        lowered = functional(program, recurrent.of_program(program.graph_module, policy) if own else None)
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

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_graph": None}  # it is bound to this module's tensors

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._graph = self._without_checks()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[Any] | None) -> Any:
        """Run the program. ``flat``: the inputs in the order of the graph's, if that is known."""
        sizes = None if flat is None or self._graph is None or torch.compiler.is_compiling() else _sizes(flat)
        with torch.no_grad(), no_autocast():
            if sizes in self._accepted:
                assert self._graph is not None
                assert flat is not None
                return pytree.tree_unflatten(self._graph(list(flat)), self._module._out_spec)
            result = self._module(*args, **kwargs)
        if sizes is not None and len(self._accepted) < REMEMBERED:
            self._accepted.add(sizes)
        return result


def _sizes(flat: list[Any]) -> tuple[Any, ...] | None:
    """Return all that a program's guards read of its inputs; None for inputs of which that is not known."""
    found: list[Any] = []
    for value in flat:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            found.append(value.shape)
        elif value is None or type(value) in (int, float, bool, str):
            found.append((type(value), value))
        else:
            return None
    return tuple(found)


def _wants_kernels(program: ExportedProgram, policy: Policy) -> bool:
    """True if some low value of the graph is on a CPU that computes some low-precision work in fp32."""
    if policy.autocast_device is not None:
        return False
    found = {
        v.dtype for _, inner in ir.all_graphs(program.graph_module) for n in inner.graph.nodes
        for v in ir.tensor_outputs(n) if v is not None and v.dtype in ir.LOW_DTYPES and v.device.type == "cpu"
    }  # fmt: skip
    return any(map(any_runs_wide, found))
