"""The frame that Dynamo is compiling: where its inputs come from, and which attributes it assigns to.

torch 2.13 internals: ``_dynamo_source`` of a placeholder, the ``side_effects`` of Dynamo's output graph (its only
record of assignments) and the guards of the tracing context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..common.torch_names import pytree


def input_sources(gm: fx.GraphModule) -> list[str]:
    """Return the source of each input of a graph as Dynamo names it, such as ``L['args'][0]`` or
    ``L['model']._buffers['mean']``."""
    found = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node, "_dynamo_source", None)
            text = str(node.target) if source is None else source.name
            found.append(text() if callable(text) else str(text))
    return found


def guard_input(gm: fx.GraphModule, number: int, fact: Callable[[Any], Any]) -> None:
    """Compile the frame again for an input whose ``bool(fact(value))`` differs from that of the current one.

    torch 2.13 internals: a guard in the tracing context becomes a check of the compiled frame if it is added before the
    backend returns; there is no public way to add a check.
    """
    node = [n for n in gm.graph.nodes if n.op == "placeholder"][number]
    source, context = getattr(node, "_dynamo_source", None), torch._guards.TracingContext.try_get()
    if source is None or context is None:
        return

    def create(builder: Any, guard: Any) -> None:
        expected = bool(fact(builder.get(guard)))
        builder.get_guard_manager(guard).add_lambda_guard(
            lambda value: bool(fact(value)) is expected, [f"wide({source.name}) is {expected}"], guard.user_stack
        )

    context.guards_context.dynamo_guards.add(source.make_guard(create))


def _assigned() -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield (dictionary, key, Dynamo's value) for each attribute that will hold a tensor after the code being compiled
    has run. Buffers of modules are dictionary items; other tensors of a module or object are stored attributes."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import LazyVariableTracker, TensorVariable

    try:
        effects = InstructionTranslator.current_tx().output.side_effects
    except AttributeError:  # the graph does not come from Dynamo
        return
    for variable, attributes in effects.store_attr_mutations.items():
        holder = getattr(getattr(variable, "value", None), "__dict__", None)
        for name, value in attributes.items():
            touched = type(value) is not LazyVariableTracker and isinstance(value, TensorVariable)
            if isinstance(holder, dict) and touched:
                yield holder, name, value
    kept: list[Any] = effects.keepalive
    for holder in kept:
        items = getattr(effects.id_to_variable.get(id(holder)), "items", None)
        for key, value in items.items() if isinstance(holder, dict) and isinstance(items, dict) else ():
            if type(value) is LazyVariableTracker:
                continue  # untouched; reading anything of a lazy value would add an input to the graph
            if isinstance(value, TensorVariable) and key.vt.is_python_constant():
                yield holder, key.vt.as_python_constant(), value


def kept_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the (output, input) positions where the model's code assigns a new tensor to an attribute that held the
    input (``self.steps = self.steps + 1``). Only Dynamo's record of side effects distinguishes these outputs."""
    last = next(iter(reversed(gm.graph.nodes)))
    outputs = pytree.tree_leaves(last.args[0])
    found = []
    for holder, key, value in _assigned():
        old = holder.get(key)
        places = [i for i, x in enumerate(example_inputs) if x is old] if isinstance(old, torch.Tensor) else []
        if (node := value.as_proxy().node) in outputs and places:
            found.append((outputs.index(node), places[0]))
    return found


def assigned_attributes() -> list[tuple[dict[str, Any], str]]:
    """Return (dictionary, key) for each attribute that the code being compiled may rebind to another tensor."""
    return [(holder, key) for holder, key, _ in _assigned()]
