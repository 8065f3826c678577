"""The inputs of a converted program: checked before it runs, because a graph with casts would accept any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ..common.errors import ArgumentError
from ..common.torch_names import pytree
from ..policy import dtype_name

#: what is never nested
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


class Inputs:
    """The names, dtypes and structure of a program's inputs."""

    def __init__(self, program: ExportedProgram) -> None:
        self.spec = program.call_spec.in_spec
        values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
        specs = [s for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        self.names = [s.arg.name for s in specs]
        found = [values.get(name) for name in self.names]
        self.dtypes = [v.dtype if isinstance(v, torch.Tensor) else None for v in found]
        positional, named = (None, None) if self.spec is None else self.spec.children()
        self.count = None if positional is None else positional.num_children
        self.keys: list[str] = [] if named is None else list(named.context)
        children = [] if positional is None or named is None else [*positional.children(), *named.children()]
        self._nested = not all(child.is_leaf() for child in children)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the inputs in the order of the graph's; raise for a call that does not fit, naming the input. None:
        the program does not say how its inputs are nested."""
        if self.spec is None:
            return None
        if len(args) != self.count or set(kwargs) != set(self.keys):
            raise ArgumentError(
                f"The model was converted for {self._signature(self.count or 0, self.keys)} but is called with "
                f"{self._signature(len(args), list(kwargs))}: pass inputs as in the example."
            )
        flat = [*args, *(kwargs[key] for key in self.keys)]
        if self._nested or not all(type(value) in _LEAVES for value in flat):
            flat, spec = pytree.tree_flatten((args, {key: kwargs[key] for key in self.keys}))
            if spec != self.spec:
                raise ArgumentError(
                    "The inputs are nested differently than the example inputs that the model was converted with."
                )
        for name, wanted, given in zip(self.names, self.dtypes, flat, strict=False):
            if wanted is None:
                continue
            if not isinstance(given, torch.Tensor):
                raise ArgumentError(f"The input '{name}' must be a {dtype_name(wanted)} tensor, not {given!r}.")
            if given.dtype is not wanted:
                raise ArgumentError(
                    f"The input '{name}' is {dtype_name(given.dtype)}, but the model was converted for "
                    f"{dtype_name(wanted)}: write {name}.to(torch.{dtype_name(wanted)})."
                )
        return flat

    @staticmethod
    def _signature(count: int, keys: list[str]) -> str:
        inputs = "1 input" if count == 1 else f"{count} inputs"
        return f"{inputs} by position" + (f" and {', '.join(sorted(keys))} by name" if keys else "")
