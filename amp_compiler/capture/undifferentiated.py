"""Take a rewritten forward graph that nothing differentiates to functional ATen, in one trace.

AOTAutograd runs every graph twice: first to learn what the graph writes to, what its results share memory with and what
needs a gradient, and then to trace it. Where nothing needs a gradient and no input is written to, there is nothing to
learn, and the trace alone gives the same graph in half the time. Other graphs are AOTAutograd's (``autodiff.py``).

torch 2.13 to 2.15 internals: ``FunctionalTensorMode`` and ``dispatch_functionalize``, with which AOTAutograd traces too
(so ops are decomposed as it decomposes them), ``enable_python_dispatcher`` (torch's decompositions in Python),
``PropagateUnbackedSymInts`` (sizes that depend on values keep their names) and ``preserve_rng_state``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .. import ir
from ..common.torch_names import OpOverload

#: the namespaces of ops that do nothing but what their schemas say
_NAMESPACES = ("aten", "prims", "amp")
#: the modules of functions of symbolic sizes
_OF_SIZES = ("_operator", "math", "torch")


def is_plain_inference(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """True if nothing is differentiated, no input is written to, inputs and ops are plain ones, and there are some."""
    if not any(isinstance(node.meta.get("val"), torch.Tensor) for node in gm.graph.nodes if node.op == "placeholder"):
        return False
    if torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in example_inputs):
        return False
    if not all(map(_is_plain, gm.graph.nodes)):
        return False
    return not any(node.op == "placeholder" for node in ir.written_nodes(gm.graph))


def _is_plain(node: fx.Node) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    if node.op == "placeholder":
        value = node.meta.get("val")
        return not isinstance(value, torch.Tensor) or type(value) is FakeTensor
    if node.op != "call_function":
        return node.op == "output"
    if isinstance(node.target, OpOverload):
        return node.target.namespace in _NAMESPACES
    return getattr(node.target, "__module__", None) in _OF_SIZES


def functional(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the graph in functional ATen, as AOTAutograd returns that of a graph without gradients."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.utils import preserve_rng_state
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    run = dispatch_functionalize(PropagateUnbackedSymInts(gm).run, FunctionalTensorMode())
    with (
        preserve_rng_state(), ir.fake_mode(gm.graph), torch.no_grad(), torch._C._DisableAutocast(),
        enable_python_dispatcher(), torch.fx.traceback.preserve_node_meta(),
    ):  # fmt: skip
        traced = make_fx(run)(*inputs)
    assert isinstance(traced, fx.GraphModule)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced
