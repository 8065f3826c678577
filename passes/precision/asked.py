"""What the author asked for: values cast to fp32 by hand, all that is computed with them, and values of no origin."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir import Because, Decision
from amp_compiler.policy import Rule


class Asked:
    """``asked``: values that the author cast to fp32, or that were computed with such. ``neutral``: floats made of
    integers, or by the model's code itself. ``constants``: nodes whose values are known."""

    def __init__(self, constants: Container[fx.Node]) -> None:
        self.constants = constants
        self.asked: dict[fx.Node, Because] = {}
        self.neutral: set[fx.Node] = set()

    def restart(self) -> None:
        """Forget what a walk has noted."""
        self.asked, self.neutral = {}, set()

    def note(self, node: fx.Node, known: Decision) -> None:
        """Spread what the author asked for to the result of a node."""
        if node in self.constants and known.precision not in ir.LOW_DTYPES:
            self.neutral.add(node)
        if node.op != "call_function" or torch.float32 not in known.out:
            return
        floats = [a for _, a in ir.tensor_args(node) if ir.is_eligible(ir.tensor_of(a))]
        if ir.is_getitem(node):
            floats = list(node.all_input_nodes)
        if known.rule is Rule.CREATION or not floats:
            self.neutral.add(node)
        elif known.rule in (Rule.AUTHOR, Rule.EXPLICIT_DTYPE):
            source = floats[0].name
            self.asked[node] = Because(f"{source}, which the model's code casts to float32", (node.name, source))
        elif known.rule is not Rule.FOLLOWS and (asked := [self.asked[a] for a in floats if a in self.asked]):
            self.asked[node] = asked[0]
        elif all(a in self.neutral for a in floats):
            self.neutral.add(node)

    def among(self, floats: Sequence[tuple[str, fx.Node]], *, whole: bool) -> Because | None:
        """Which of ``floats`` the author cast to fp32; with ``whole``, only if none is otherwise."""
        found = [self.asked[a] for _, a in floats if a in self.asked]
        if not found or (whole and any(a not in self.asked and a not in self.neutral for _, a in floats)):
            return None
        return found[0]

    def are_neutral(self, floats: Sequence[tuple[str, fx.Node]]) -> bool:
        """True if all of ``floats`` come from constants of the model's code alone."""
        return all(a in self.neutral for _, a in floats)
