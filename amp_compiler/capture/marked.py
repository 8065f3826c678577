"""``requires_grad_()`` on a value inside a graph, as the hooks of gradient checkpointing call it.

Dynamo puts it into a graph only if no output depends on it by way of autograd: under ``no_grad``, or if all that is
made of the value is detached. Then it has no effect, unless the graph itself computes gradients.

torch 2.13: Dynamo writes it between two calls that allow it inside of torch.func.
"""

from __future__ import annotations

import torch
from torch import fx

_ALLOW = getattr(torch._C._functorch, "set_inplace_requires_grad_allowed", None)


def is_mark(node: fx.Node) -> bool:
    """True for a call of ``requires_grad_`` on a value, and for the calls around it."""
    if node.op == "call_method":
        return node.target == "requires_grad_"
    return node.op == "call_function" and _ALLOW is not None and node.target is _ALLOW


def uses_gradients(gm: fx.GraphModule) -> bool:
    """True if the graph itself computes gradients."""
    return any(n.op == "call_function" and n.target in (torch.autograd.grad, torch.autograd.backward)
               for n in gm.graph.nodes)  # fmt: skip
