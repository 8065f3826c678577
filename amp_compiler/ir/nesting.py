"""Compiled models inside of a model that is compiled again: each keeps its own policy.

While the outer model is captured, a part that is compiled itself runs its original between two marks in the graph
(``amp::scope``, as for a ``precision`` scope). ``normalize`` removes the marks and writes the part's policy on the
nodes between them; ``policy_at`` returns the policy of a node. The other options are those of the outer model.
"""

from __future__ import annotations

import contextlib
import functools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .. import ir
from ..common.errors import PolicyError
from ..policy import Policy

_MARK = "policy\n"


@dataclass(frozen=True, slots=True)
class Nested:
    """The policy of a part that was compiled by itself. ``root``: its path, to which its module rules are relative."""

    policy: Policy
    root: str

    def relative(self, path: str) -> str | None:
        """Return a path of the outer model relative to the part; None if it is outside of the part."""
        if not self.root or path == self.root:
            return "" if path == self.root else path
        return path.removeprefix(f"{self.root}.") if path.startswith(f"{self.root}.") else None


def mark_of(policy: Policy) -> str:
    """Return the mark for the beginning of a part with this policy."""
    return _MARK + policy.to_toml()


@functools.lru_cache(maxsize=256)
def marked_policy(mark: str) -> Policy | None:
    """Return the policy of a part that begins at this mark; None for other marks."""
    return Policy.from_dict(tomllib.loads(mark.removeprefix(_MARK))) if mark.startswith(_MARK) else None


@contextlib.contextmanager
def policy_region(mark: str) -> Iterator[None]:
    """Enclose the code of a part while the outer model is captured. A generator, like ``scopes.precision``."""
    torch.ops.amp.scope(mark)
    try:
        yield
    finally:
        torch.ops.amp.scope("")


def has_parts(gm: fx.GraphModule) -> bool:
    """True if a graph, or one inside it, contains parts that were compiled by themselves."""
    graphs = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    texts = (a for m in graphs for n in m.graph.nodes if n.op == "call_function" for a in n.args)
    return any(isinstance(text, str) and text.startswith(_MARK) for text in texts)


def policy_at(node: fx.Node, default: Policy) -> Policy:
    """Return the policy that applies to a node."""
    found = node.meta.get(ir.NESTED)
    return found.policy if isinstance(found, Nested) else default


def policies_in(gm: fx.GraphModule, default: Policy) -> list[Policy]:
    """Return all policies that apply somewhere in a graph, the default first."""
    found = (node.meta.get(ir.NESTED) for node in gm.graph.nodes)
    return list(dict.fromkeys([default, *(n.policy for n in found if isinstance(n, Nested))]))


def check_together(outer: Policy, inner: Policy, path: str) -> None:
    """Raise if only one of the policies is ``Policy.torch``: it needs a graph of different ops than the levels do."""
    if (outer.autocast_device is None) != (inner.autocast_device is None):
        kinds = [f"Policy.torch({p.autocast_device!r})" if p.autocast_device else f"level {p.level!r}"
                 for p in (outer, inner)]  # fmt: skip
        raise PolicyError(
            f"The model is compiled with {kinds[0]}, but its part '{path}' was compiled with {kinds[1]}: the two "
            "cannot be in one graph. Use the same kind of policy for both, or replace the part by its original "
            "(part.original)."
        )


def check_parts(outer: Policy, modules: Mapping[str, nn.Module]) -> None:
    """Raise for parts that cannot be compiled again, before anything is captured."""
    for path, module in modules.items():
        for part in (module, module.__dict__.get("forward")):
            inner = compiled_policy(part)
            if inner is not None:
                check_together(outer, inner, path)


def compiled_policy(part: Any) -> Policy | None:
    """Return the policy of a module or method compiled by ``amp_compile``; None for anything else."""
    policy = part.policy if getattr(type(part), "_amp_compiled", False) else None
    return policy if isinstance(policy, Policy) else None


