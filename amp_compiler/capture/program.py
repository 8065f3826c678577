"""Take ExportedPrograms apart and rebuild them around a graph that passes have rewritten.

torch 2.13: an ExportedProgram is a graph, a signature that names each input and output, and the tensors behind the
inputs; ``torch.export.ExportedProgram(...)`` checks that they agree. Its serializer writes the graph as JSON, and the
deserializer accepts tensors that were read elsewhere.
"""

from __future__ import annotations

import copy
import io
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from .. import ir
from ..common.torch_names import pytree
from ..ir.weights import Weight, Weights

_KINDS = {
    InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"
}  # fmt: skip
_BY_NAME = {name: kind for kind, name in _KINDS.items()}


def weights_of(program: ExportedProgram) -> Weights:
    """Return the weights behind the first inputs of a program's graph."""
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in _KINDS and spec.target is not None:
            tensors = program.state_dict if spec.target in program.state_dict else program.constants
            value = tensors[spec.target]
            if isinstance(value, torch.Tensor):
                kind, persistent = _KINDS[spec.kind], spec.persistent is not False
                found[spec.arg.name] = Weight(spec.target, kind, partial(_same, value), persistent, _memory(value))
    return Weights(found)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _memory(value: torch.Tensor) -> Any:
    """Return a key that is equal for two tensors that are the same elements of the same memory."""
    if value.layout is not torch.strided or type(value.data) is not torch.Tensor or not value.numel():
        return id(value)
    return value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride()


@dataclass(frozen=True)
class Frame:
    """A program without its graph and its weights."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    call: Any
    ranges: dict[Any, Any]
    verifiers: list[Any]
    objects: dict[str, Any]
    example_inputs: Any

    @classmethod
    def of(cls, program: ExportedProgram, *, example_inputs: bool = True) -> Frame:
        signature = program.graph_signature
        return cls(
            tuple(signature.input_specs), tuple(signature.output_specs), program.module_call_graph[0],
            dict(program.range_constraints), list(program.verifiers),
            {k: v for k, v in program.constants.items() if not isinstance(v, torch.Tensor)},
            program.example_inputs if example_inputs else None,
        )  # fmt: skip


def rebuild(
    frame: Frame, graph: fx.Graph, make: Callable[[fx.Node, Weight], torch.Tensor], weights: Weights,
    *, out_spec: Any = None, example_inputs: Any = None,
) -> ExportedProgram:  # fmt: skip
    """Rebuild a program around its own graph or a copy of it, with the weights that ``make`` returns."""
    before = {spec.arg.name: spec for spec in frame.inputs}
    inputs: list[InputSpec] = []
    state: dict[str, Any] = {}
    constants: dict[str, Any] = dict(frame.objects)
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        if node not in weights:
            inputs.append(before[node.name])
            continue
        weight = weights[node]
        value = make(node, weight)
        persistent = weight.persistent if weight.kind == "buffer" else None
        inputs.append(InputSpec(_BY_NAME[weight.kind], TensorArgument(node.name), weight.path, persistent))
        if weight.kind == "parameter":
            state[weight.path] = nn.Parameter(value, requires_grad=False)
        elif weight.kind == "buffer" and weight.persistent:
            state[weight.path] = value
        else:
            constants[weight.path] = value
    last = next(iter(reversed(graph.nodes)))
    outputs = []
    for spec, result in zip(frame.outputs, last.args[0], strict=True):
        named = spec.kind is OutputKind.USER_OUTPUT and isinstance(result, fx.Node) and hasattr(spec.arg, "name")
        arg = replace(spec.arg, name=result.name) if named else spec.arg
        outputs.append(OutputSpec(spec.kind, arg, spec.target))
    entry = copy.copy(frame.call)
    called = copy.copy(entry.signature)
    assert called is not None
    called.outputs = [spec.arg for spec in outputs if spec.kind is OutputKind.USER_OUTPUT]
    if out_spec is not None:
        called.out_spec = out_spec
    entry.signature = called
    return ExportedProgram(
        root=_holder(graph), graph=graph, graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=state, range_constraints=dict(frame.ranges), module_call_graph=[entry],
        example_inputs=example_inputs if example_inputs is not None else frame.example_inputs,
        constants=constants, verifiers=list(frame.verifiers),
    )  # fmt: skip


def flat_inputs(program: ExportedProgram) -> tuple[list[Any], Any]:
    """Return the example inputs in the order of the graph's own inputs, and the spec to unflatten them."""
    from torch.export._tree_utils import reorder_kwargs

    args, kwargs = program.example_inputs
    return pytree.tree_flatten((args, reorder_kwargs(kwargs, program.call_spec.in_spec)))


def _holder(graph: fx.Graph) -> nn.Module:
    """Return a module with the targets of ``graph``'s get_attr nodes: bodies of higher-order ops, constants of inlined
    regions."""
    holder = nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(holder, str(node.target), getattr(graph.owning_module, str(node.target)))
    return holder


# ------------------------------------------------------------------------------------ outputs of other classes


def plain_spec(spec: Any) -> Any:
    """Return the same tree with tuples, lists and dicts only: any other class would have to be known where a file is
    loaded. Classes that name their children (a dataclass, a ``ModelOutput``) become dicts, others tuples."""
    if spec.is_leaf():
        return spec
    children = [plain_spec(child) for child in spec.children()]
    if spec.type in (tuple, list, dict):
        return pytree.TreeSpec(spec.type, spec.context, children)
    keys = _keys(spec.context)
    if keys is not None and len(keys) == len(children):
        return pytree.TreeSpec(dict, keys, children)
    return pytree.TreeSpec(tuple, None, children)


def _keys(context: Any) -> list[str] | None:
    """Return the names of the children in a class's pytree context: a list of names, or one inside a pair."""
    for found in (context, *(context if isinstance(context, (list, tuple)) else ())):
        if isinstance(found, (list, tuple)) and found and all(isinstance(key, str) for key in found):
            return list(found)
    return None


# ------------------------------------------------------------------------------------------- for running it


def functional(program: ExportedProgram, more: Mapping[Any, Callable[..., Any]] | None = None) -> ExportedProgram:
    """Return a copy of a program in functional ATen, like AOTAutograd's inference graphs; dynamic shapes stay dynamic.
    ``more``: decompositions of further ops.

    torch 2.13: ``run_decompositions`` keeps composite ops that its table does not name, so the table names those whose
    contents passes on functional graphs need to see.
    """
    aten, known = torch.ops.aten, torch.export.default_decompositions()
    composites = [getattr(getattr(aten, name), overload) for name, overload in COMPOSITES]
    table = {**{op: known[op] for op in composites}, **(more or {})}
    with torch._C._DisableAutocast(), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # caused by torch copying its own tree specs
        result: ExportedProgram = program.run_decompositions(table)
    return result


#: ops that contain a matrix product, a convolution or attention
COMPOSITES = (
    ("linear", "default"), ("matmul", "default"), ("einsum", "default"), ("tensordot", "default"),
    ("scaled_dot_product_attention", "default"),
    *((f"conv{n}d", overload) for n in (1, 2, 3) for overload in ("default", "padding")),
    ("conv_transpose1d", "default"), ("conv_transpose2d", "input"), ("conv_transpose3d", "input"),
)  # fmt: skip


def foreign_ops(program: ExportedProgram) -> list[str]:
    """Return the ops of a program that plain torch does not have."""
    found = []
    for _, inner in ir.all_graphs(program.graph_module):
        for node in inner.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims"):
                found.append(ir.op_name(node))
    return sorted(set(found))


# --------------------------------------------------------------------------------------------- graphs as JSON


def to_json(program: ExportedProgram) -> str:
    """Return the graph of a program as JSON, without any tensor."""
    from torch._export.serde.serialize import serialize

    found = serialize(program, serialize_state_dict=False, serialize_constants=False, serialize_example_inputs=False)
    return found.exported_program.decode()


def from_json(text: str | bytes, state: dict[str, Any], constants: dict[str, Any], example: Any) -> ExportedProgram:
    """Return a program from a graph and tensors that were read by other means. ``text`` must have been checked."""
    from torch._export.serde import schema
    from torch._export.serde.serialize import ExportedProgramDeserializer, _bytes_to_dataclass

    data = text.encode() if isinstance(text, str) else text
    graph = _bytes_to_dataclass(schema.ExportedProgram, data)
    given: Any = example or {}  # tuples and dicts are used as they are; bytes would be unpickled
    return ExportedProgramDeserializer().deserialize(graph, state, constants, given)


def parts(archive: zipfile.ZipFile) -> tuple[bytes, bytes]:
    """Return (the graph's JSON, the example inputs' file) of an archive."""
    root = archive.namelist()[0].split("/", 1)[0]
    return archive.read(f"{root}/models/model.json"), archive.read(f"{root}/data/sample_inputs/model.pt")


def load(file: IO[bytes], graph: bytes, sample: bytes) -> ExportedProgram:
    """Load the program from an archive that was checked to contain no pickled tensor."""
    from torch.export.pt2_archive._package import PT2ArchiveReader, _load_constants, _load_state_dict

    with PT2ArchiveReader(file) as reader:
        state, constants = _load_state_dict(reader, "model"), _load_constants(reader, "model")
    assert isinstance(state, dict)
    assert isinstance(constants, dict)
    example = torch.load(io.BytesIO(sample), weights_only=True) if sample else None
    return from_json(graph, state, constants, example)
