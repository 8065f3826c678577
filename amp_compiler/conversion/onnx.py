"""A converted model as ONNX, through torch's own exporter."""

from __future__ import annotations

import logging
import os
import warnings

import torch
from torch import fx
from torch.export import ExportedProgram

from .. import ir
from ..capture.program import Frame, rebuild, weights_of
from ..common.errors import ArchiveError
from ..common.files import replacing
from ..common.messages import first_line
from ..ir.weights import Weight

aten = torch.ops.aten
#: ops that torch runs on low values with fp32 weights and statistics, but ONNX on one dtype only
NORMS = ("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm")


def write(path: str | os.PathLike[str], program: ExportedProgram) -> None:
    """Write a converted program to ``path``, weights as initializers in the precision in which they are stored."""
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ArchiveError("ONNX needs more packages:", hint="pip install 'amp-compiler[onnx]'.") from error
    with replacing(path, what="The model", error=ArchiveError, example="model.onnx") as scratch:
        try:
            with warnings.catch_warnings(), _quiet():
                warnings.simplefilter("ignore")  # torch's exporter shows deprecation warnings about itself
                made = torch.onnx.export(_one_dtype_norms(program), dynamo=True, verbose=False)
        except torch.onnx.errors.OnnxExporterError as error:
            told = f"torch's ONNX exporter cannot export this model: {first_line(error)}"
            raise ArchiveError(told, hint="Use save() instead.") from error
        assert made is not None
        made.save(scratch)  # weights of more than 2 GB go into a second file next to it


class _quiet:
    """Silences the exporter, which logs each optional package that it does not find."""

    def __enter__(self) -> None:
        self._log = logging.getLogger("torch.onnx._internal.exporter._registration")
        self._level = self._log.level
        self._log.setLevel(logging.ERROR)

    def __exit__(self, *error: object) -> None:
        self._log.setLevel(self._level)


def _one_dtype_norms(program: ExportedProgram) -> ExportedProgram:
    """``layer_norm(x: bf16, w: f32)`` → ``cast(layer_norm(cast(x, f32), w), bf16)``, as in torch's kernel."""
    assert isinstance(program.graph_module, fx.GraphModule)
    gm, weights = ir.copy_graph(program.graph_module), weights_of(program)
    found = [n for n in gm.graph.nodes if n.op == "call_function" and ir.op_name(n) in NORMS and _is_mixed(n)]
    if not found:
        return program
    for node in found:
        _in_fp32(gm.graph, node)

    def make(node: fx.Node, weight: Weight) -> torch.Tensor:
        return weight.make().detach()

    return rebuild(Frame.of(program), gm.graph, make, weights)


def _is_mixed(node: fx.Node) -> bool:
    dtypes = {a.meta["val"].dtype for _, a in ir.tensor_args(node)}
    return torch.float32 in dtypes and bool(dtypes & set(ir.LOW_DTYPES))


def _in_fp32(graph: fx.Graph, node: fx.Node) -> None:
    value = ir.tensor_of(node)
    assert value is not None
    for _, arg in ir.tensor_args(node):
        if arg.meta["val"].dtype in ir.LOW_DTYPES:
            with graph.inserting_before(node):
                wide = graph.call_function(aten.to.dtype, (arg, torch.float32))
            wide.meta = {**node.meta, "val": ir.retype(arg.meta["val"], torch.float32)}
            node.replace_input_with(arg, wide)
    node.meta["val"] = ir.retype(value, torch.float32)
    readers = list(node.users)
    with graph.inserting_after(node):
        low = graph.call_function(aten.to.dtype, (node, value.dtype))
    low.meta = {**node.meta, "val": value}
    for user in readers:
        user.replace_input_with(node, low)
