"""Graphs with the weights behind them, as the passes of a conversion take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from amp_compiler import Policy, ir
from amp_compiler.capture.export import capture_export
from amp_compiler.capture.program import weights_of
from amp_compiler.ir.weights import Weights
from amp_compiler.passes.normalize import PASS as NORMALIZE
from amp_compiler.policy.scopes import marked_modules, modules_of
from amp_compiler.rewrite.base import Context, Pass
from helpers import BF16, FORWARD, check_pass


class Weighted:
    """A module's exported graph, its weights, and a context for passes. ``cast``: run all forward passes first."""

    def __init__(
        self, model: nn.Module, *inputs: Any, level: str = "O2", dtype: torch.dtype = BF16,
        policy: Policy | None = None, cast: bool = False, dynamic_shapes: Any = None, keep: bool = True,
    ) -> None:  # fmt: skip
        model.eval()
        captured = capture_export(model, inputs, dynamic_shapes=dynamic_shapes)
        self.gm, self.inputs = captured.graph, inputs
        self.weights: Weights = weights_of(captured.program)
        modules = marked_modules(modules_of(model))
        self.ctx = Context(policy or Policy(level, dtype), keep, modules, weights=self.weights)
        for step in FORWARD if cast else (NORMALIZE,):
            step.run(self.gm, self.ctx)

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph on its weights as they are now."""
        given = iter(inputs or self.inputs)
        places = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        with torch.no_grad():
            return self.gm(*(self.weights.value(n) if n in self.weights else next(given) for n in places))

    def check(self, pass_: Pass, expected: str | None = None, *, modified: bool | None = None) -> Weighted:
        """``check_pass``, with the weights for its context."""
        check_pass(pass_, self.gm, self.ctx, expected, modified=modified)
        return self

    def dtypes(self) -> dict[str, torch.dtype]:
        """Path -> dtype of each weight; the value agrees with what the graph says of it."""
        found = {}
        for node in self.gm.graph.nodes:
            if node in self.weights:
                value, said = self.weights.value(node), node.meta["val"]
                assert value.dtype is said.dtype
                assert tuple(value.shape) == tuple(said.shape)
                found[self.weights[node].path] = value.dtype
        return found

    def names(self) -> list[str]:
        """The ops of the graph in order."""
        return [ir.op_name(n) for n in self.gm.graph.nodes if n.op == "call_function"]


def snr(ours: Any, exact: Any) -> float:
    """Signal to noise in dB of all float outputs together."""
    noise = signal = 0.0
    for a, b in zip(floats(ours), floats(exact), strict=True):
        a, b = a.detach(), b.detach()
        noise += float((a.double() - b.double()).pow(2).sum())
        signal += float(b.double().pow(2).sum())
    return 10 * torch.log10(torch.tensor(signal / noise)).item() if noise else float("inf")


def floats(tree: Any) -> list[Tensor]:
    """The float tensors of a tree of outputs."""
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def stored_casts(gm: fx.GraphModule, weights: Weights) -> list[fx.Node]:
    """Casts that read a weight directly."""
    return [n for n in gm.graph.nodes if ir.is_float_cast(n) and ir.cast_source(n) in weights]
