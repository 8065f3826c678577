"""What Inductor has to be told about a graph that our passes have rewritten.

Inductor compiles the ops that it knows, and calls all others as they are, in the layout that was traced.
"""

from __future__ import annotations

import torch
from torch import fx

from .. import ir
from ..kernels.wide import FORMS

aten = torch.ops.aten
_CONVOLUTION, _BACKWARD = FORMS[aten.convolution.default], FORMS[aten.convolution_backward.default]
_CAST = torch.ops.prims.convert_element_type.default


def prepare(graph: fx.Graph) -> None:
    """Write the ops of our passes as ops that Inductor has code for."""
    _open_convolutions(graph)
    _decompose_casts(graph)


def _open_convolutions(graph: fx.Graph) -> None:
    """Replace ``amp::wide_convolution`` by what it stands for: torch's convolution in fp32 between casts.

    Inductor then chooses the layout, in which oneDNN's convolutions are faster, and its loops before and after them
    widen and round. A graph with convolutions to differentiate stays as it is: the same loops would write what the
    backward reads in fp32 as well, and hold it until then (a small ResNet's step took nine tenths of the time, but
    1.8 times the memory, more than in fp32).
    """
    if any(node.target is _BACKWARD for node in graph.nodes):
        return
    widened: dict[fx.Node, fx.Node] = {}

    def wide(node: fx.Node) -> fx.Node:
        if node not in widened:
            widened[node] = _cast(graph, node, torch.float32)
        return widened[node]

    for node in list(graph.nodes):
        if node.target is not _CONVOLUTION:
            continue
        value = node.meta["val"]
        with graph.inserting_before(node):
            node.args = fx.map_arg(node.args, wide)
            node.kwargs = fx.map_arg(node.kwargs, wide)
        node.target, node.meta["val"] = aten.convolution.default, ir.retype(value, torch.float32)
        readers = list(node.users)
        with graph.inserting_after(node):
            rounded = _cast(graph, node, value.dtype)
        for reader in readers:
            reader.replace_input_with(node, rounded)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    value = ir.tensor_of(node)
    if value is None or value.dtype == dtype:
        return node
    new = graph.call_function(_CAST, (node, dtype))
    new.meta = {**node.meta, "val": ir.retype(value, dtype)}
    return new


def _decompose_casts(graph: fx.Graph) -> None:
    """Decompose ``_to_copy``, which passes insert as casts. Inductor decomposes it while it traces a graph and has no
    code for it, but these passes run later (torch 2.13 fails with "both a fallback and a decomp")."""
    for node in graph.nodes:
        if node.target is aten._to_copy.default and ir.is_cast(node):
            node.args = (ir.cast_source(node), ir.cast_dtype(node))
            node.kwargs = {}
            node.target = _CAST
