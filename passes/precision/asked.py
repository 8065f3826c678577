"""Values that the author cast to fp32, what is computed with them, and values that come from constants only."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir import Because, Decision
from amp_compiler.policy import Rule


class Asked:
    """``asked``: values that the author cast to fp32, or that were computed with such values. ``neutral``: floats made
    from integers, or created by the model's code. ``constants``: nodes whose values are known."""

    def __init__(self, constants: Container[fx.Node]) -> None:
        self.constants = constants
        self.asked: dict[fx.Node, Because] = {}
        self.neutral: set[fx.Node] = set()

    def restart(self) -> None:
        """Forget what a walk has recorded."""
        self.asked, self.neutral = {}, set()

    def note(self, node: fx.Node, known: Decision) -> None:
        """Record whether the result of a node was computed with values that the author cast."""
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
        """Return which of ``floats`` the author cast to fp32; with ``whole``, only if all of them were."""
        found = [self.asked[a] for _, a in floats if a in self.asked]
        if not found or (whole and any(a not in self.asked and a not in self.neutral for _, a in floats)):
            return None
        return found[0]

    def are_neutral(self, floats: Sequence[tuple[str, fx.Node]]) -> bool:
        """True if all of ``floats`` come from constants of the model's code alone."""
        return all(a in self.neutral for _, a in floats)
