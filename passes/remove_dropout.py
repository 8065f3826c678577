"""remove_dropout: remove dropout that does nothing.

``dropout(x, 0.5, False)``  →  ``x``; likewise ``alpha_dropout``, ``feature_dropout`` and their in-place forms, in eval
mode or with a probability of 0. torch returns ``x`` itself there, so the difference cannot be observed.

Dropout that the model's code asks for at inference (``F.dropout(x, training=True)``) stays.
Requires: normalized. Ensures: normalized. A second run changes nothing.
"""

from __future__ import annotations

from torch import fx

from amp_compiler import ir
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import NORMALIZED

OPS = frozenset(f"{kind}dropout{end}" for kind in ("", "feature_", "alpha_", "feature_alpha_") for end in ("", "_"))


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    modified = False
    for _, inner in ir.all_graphs(gm):
        found = [n for n in inner.graph.nodes if n.op == "call_function" and ir.op_name(n) in OPS and _is_idle(n)]
        for node in found:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
            inner.graph.erase_node(node)
        if found:
            inner.recompile()
            modified = True
    return modified


def _is_idle(node: fx.Node) -> bool:
    named = ir.all_args(node)
    return named.get("train") is False or named.get("p") == 0


PASS = Pass("remove_dropout", Dialect.PRE_DISPATCH, requires=(NORMALIZED,), ensures=(NORMALIZED,), run=run)
