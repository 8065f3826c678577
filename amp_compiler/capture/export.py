"""The front end for anything that is saved or looked at: ``torch.export``, dynamic shapes as declared.

torch 2.13: ``torch.export.export(strict=False)`` gives pre-dispatch ATen already; it needs
``fx.traceback.preserve_node_meta`` to keep annotations, and a graph signature names the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx.traceback
from torch import fx, nn

from .. import graph as g
from ..errors import CaptureError
from .dynamo import capture_settings
from .lower import annotate_origin


def export_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Export a module to pre-dispatch ATen, each node with its module path and source line."""
    try:
        with torch.fx.traceback.preserve_node_meta(), capture_settings(), _no_autocast():
            program = torch.export.export(
                model, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"{type(model).__name__} cannot be exported: {first} "
            "Try amp_compile, which works around code that cannot be in a graph, or rewrite that line."
        ) from error
    for _, inner in g.all_graphs(program.graph_module):
        for node in inner.graph.nodes:
            node.meta = dict(node.meta)  # export lets a node inside a region share its meta with one outside
        annotate_origin(inner, {id(m): name for name, m in model.named_modules()})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for node in program.graph_module.graph.nodes:
        path = program.graph_signature.inputs_to_parameters.get(node.name) if node.op == "placeholder" else None
        if path in parameters and parameters[path].requires_grad:
            node.meta[g.PARAMETER] = True
    return program


def capture_export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> fx.GraphModule:
    """The exported graph alone, as passes take it: parameters and buffers are its first inputs."""
    graph = export_program(model, args, kwargs, dynamic_shapes).graph_module
    assert isinstance(graph, fx.GraphModule)
    return graph


def _no_autocast() -> Any:
    return torch._C._DisableAutocast()
