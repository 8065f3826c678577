"""Lower Dynamo's graph of torch functions to pre-dispatch ATen, with module path and source line on every node.

torch 2.13 internals used here, and why:

- ``process_inputs`` / ``construct_fake_mode`` (torch._functorch): the fakes that AOTAutograd itself will use,
  with Dynamo's symbolic shapes; making our own would create a second set of symbols.
- ``make_fx(..., pre_dispatch=True)`` under ``fx.traceback.preserve_node_meta``: the only tracer that keeps
  composite ops (``aten.linear``) whole and passes on where each node came from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .. import ir
from ..common.errors import CaptureError
from ..common.torch_names import pytree
from ..policy import Policy
from . import composites, origin, placed, recurrent, vmap
from .composites import Decompositions
from .higher_order import is_closed
from .interpreter import LoweringInterpreter, PromotingInterpreter
from .marked import is_mark, uses_gradients
from .vmap import is_functorch, is_vmap


def lower(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    policy: Policy,
    modules: Mapping[int, str],
    *,
    fakes: Sequence[Any] | None = None,
    promote: bool = False,
    inside: tuple[str, type] | None = None,
    given_low: Container[torch.dtype] = (),
) -> fx.GraphModule:
    """Lower one graph from Dynamo. ``modules`` maps ``id(module)`` to its path in the user's model.

    ``fakes``: values for the graph's inputs to use instead of ``example_inputs``. ``promote``: where torch refuses
    operands of two float dtypes, use the wider one (for the twin, see ``twin.py``). ``inside``: path and class of the
    module whose forward the graph is made of, where its call is not in it. ``given_low``: inputs of these dtypes are
    lowered as fp32, which they are in the user's model.
    """
    if fakes is None:
        fakes, mode = fakify(example_inputs)
    else:
        modes = (getattr(v, "fake_mode", None) for v in fakes)
        mode = next((m for m in modes if m is not None), None) or torch._guards.detect_fake_mode(list(fakes))
    loss = _take_out_loss(gm)
    plain = vmap.without_vmap(gm)
    batched, gm = plain is not gm, plain
    interpreter = PromotingInterpreter(gm, garbage_collect_values=False) if promote else LoweringInterpreter(gm)
    fakes = placed.in_global_form(fakes, mode)
    fakes = [ir.retype(v, torch.float32) if getattr(v, "dtype", None) in given_low else v for v in fakes]
    with _tracing(mode):
        lowered = make_fx(interpreter.run, decomposition_table=decompositions(policy), pre_dispatch=True)(
            *fakes
        )
    assert isinstance(lowered, fx.GraphModule)
    placed.keep_calls(lowered, interpreter.placements)
    lowered.graph.eliminate_dead_code()
    _refuse_leaks(lowered, mode)
    origin.name_inputs(gm, lowered)
    origin.mark_parameters(lowered, example_inputs)
    for _, inner in ir.all_graphs(lowered):
        origin.annotate_origin(inner, modules, inside)
        for node in inner.graph.nodes:
            for key in (ir.DTYPE_OF, ir.NUMBER_OF):
                if isinstance(of := node.meta.get(key), fx.Node):
                    node.meta[key] = of.name  # names are final only now
    lowered.meta.update(gm.meta)
    lowered.meta[ir.LOSS] = loss
    lowered.meta[ir.FOLLOWED] = interpreter.follows and not batched and not given_low
    lowered.meta[ir.OUTPUT_DTYPES] = [None if d in given_low else d for d in _output_dtypes(gm)]
    if not promote:  # a twin is only read
        lowered.recompile()
    return lowered


def _take_out_loss(gm: fx.GraphModule) -> int | None:
    """Remove the node ``amp::loss``, which marks the loss of a training step; return the position of that output."""
    last = next(iter(reversed(gm.graph.nodes)))
    place = None
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in (torch.ops.amp.loss, torch.ops.amp.loss.default):
            place = pytree.tree_leaves(last.args[0]).index(node)
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            gm.recompile()
    return place


def _output_dtypes(gm: fx.GraphModule) -> list[torch.dtype | None]:
    """Return the dtypes of the model's outputs. Only Dynamo's values have them: it ran nested autocast regions, while
    lowering turns them into nodes."""
    last = next(iter(reversed(gm.graph.nodes)))
    values = [n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in pytree.tree_leaves(last.args[0])]
    return [v.dtype if isinstance(v, torch.Tensor) else None for v in values]


def why_not(gm: fx.GraphModule) -> str | None:
    """Return why a graph from Dynamo must not be lowered; None if it may be.

    Tracing runs the graph on fakes. A tensor that the graph holds itself (optimizer state) is real and would be
    written to; levels of torch.func exist only at run time, and a fake would leak out of them.
    """
    ignored = is_mark if not uses_gradients(gm) else lambda node: False
    for node in gm.graph.nodes:
        held = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, torch.Tensor):
            return "it holds tensors of its own, such as an optimizer's state"
        if is_functorch(node) and not is_vmap(node) and not ignored(node):
            return f"it uses torch.func ({getattr(node.target, '__name__', node.target)})"
        if ir.is_higher_order(node):
            bodies = [inner for _, inner in ir.subgraphs(gm, node)]
            if not is_closed(node.target, bodies):
                refused = next((why for inner in bodies if (why := why_not(inner)) is not None), None)
                if refused is not None:
                    return refused
    return None


def fakify(example_inputs: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the inputs as AOTAutograd's fakes, and their fake mode."""
    from torch._functorch._aot_autograd.frontend_utils import construct_fake_mode, process_inputs
    from torch._functorch._aot_autograd.schemas import AOTConfig

    config = AOTConfig(
        fw_compiler=None, bw_compiler=None, partition_fn=None, decompositions={}, num_params_buffers=0, aot_id=0,
        keep_inference_input_mutations=False,
    )  # fmt: skip
    flat = list(example_inputs)
    mode, shape_env = construct_fake_mode(flat, config)
    fakes, _ = process_inputs(flat, config, mode, shape_env)
    return list(fakes), mode


def _refuse_leaks(gm: fx.GraphModule, mode: Any) -> None:
    """Refuse a graph that holds a fake of the trace, which has no value. What the model's code makes is real."""
    for _, inner in ir.all_graphs(gm):
        for node in inner.graph.nodes:
            held = getattr(inner, str(node.target), None) if node.op == "get_attr" else None
            if held is not None and getattr(held, "fake_mode", None) is mode:
                raise CaptureError(f"a value of the trace became a constant of the graph ({node.target})")


@contextlib.contextmanager
def _tracing(mode: Any) -> Iterator[None]:
    with mode, torch.fx.traceback.preserve_node_meta():
        yield


def decompositions(policy: Policy) -> Decompositions:
    """Return the ops to decompose while lowering: RNNs always (torch's fused CPU op has no usable backward under
    AOTAutograd), and under ``Policy.torch`` composite ops."""
    return {**composites.decompositions(policy), **recurrent.decompositions(policy)}
