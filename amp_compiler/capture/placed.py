"""Tensor parallel models: graphs of Dynamo's whose values are DTensors.

A DTensor computes as a tensor of its global shape does, so it is lowered as one: inputs are plain fakes of the global
shape, and precision is decided as for the model without ``parallelize_module``. What moves values between the local and
the global form (``from_local``, ``redistribute``, ``to_local``) is a node ``amp::placed``. Before AOTAutograd, which
takes DTensors apart into local tensors and collectives, ``restored`` puts the calls back in the places of these nodes;
they run in the precision of what they move.

torch 2.13 internals: ``FakeScriptObject.real_obj`` (a device mesh is an input of Dynamo's graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import ir
from ..common.torch_names import is_dtensor, pytree

_LIBRARY = torch.library.Library("amp", "FRAGMENT")
_LIBRARY.define("placed(Tensor x, SymInt[] size, int call) -> Tensor")
torch.library.register_fake("amp::placed", lambda x, size, call: x.new_empty(size), lib=_LIBRARY)
_PLACED = torch.ops.amp.placed.default
#: gm.meta key: the calls that the nodes ``amp::placed`` stand for
_CALLS = "amp_placed"
_METHODS = ("redistribute", "to_local", "full_tensor")


def in_global_form(fakes: Sequence[Any], mode: Any) -> list[Any]:
    """Inputs of a graph, with plain fakes for DTensors."""

    def plain(value: Tensor) -> Tensor:
        with mode:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad)

    return [plain(value) if is_dtensor(value) else value for value in fakes]


class Placements:
    """The calls of one graph that move values between local and global form, in the order of their nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        values = (n.meta.get("example_value") for n in graph.nodes)
        self.needed = any(map(is_dtensor, values))
        self.calls: list[Callable[[Any], Any]] = []

    def call(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``node`` gives if it is such a call, else ``NotImplemented``."""
        if not self.needed or not (_is_from_local(target) or (node.op == "call_method" and target in _METHODS)):
            return NotImplemented
        rest, named = _real(args[1:]), _real(kwargs)

        def placed(value: Any) -> Any:
            function = getattr(type(value), target) if isinstance(target, str) else target
            return function(value, *rest, **named)

        self.calls.append(placed)
        return _PLACED(args[0], list(node.meta["example_value"].shape), len(self.calls) - 1)


def _is_from_local(target: Any) -> bool:
    name = getattr(target, "__qualname__", "")
    return name == "DTensor.from_local" or (
        name == "distribute_tensor" and str(getattr(target, "__module__", "")).startswith("torch.distributed.tensor")
    )


def _real(value: Any) -> Any:
    return pytree.tree_map(lambda v: getattr(v, "real_obj", v), value)


def keep_calls(lowered: fx.GraphModule, placements: Placements) -> None:
    """Remember the calls with the graph that has their nodes."""
    if placements.calls:
        lowered.meta[_CALLS] = placements.calls


def restored(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with calls in the places of their nodes; itself if it has none."""
    calls = gm.meta.get(_CALLS)
    if not calls:
        return gm
    made = ir.copy_graph(gm)
    for node in list(made.graph.nodes):
        if node.target is _PLACED:
            value, _, number = node.args
            with made.graph.inserting_before(node):
                new = made.graph.call_function(calls[number], (value,))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            made.graph.erase_node(node)
    made.recompile()
    return made
