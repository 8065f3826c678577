"""The front end for models that are saved or inspected: ``torch.export``, with dynamic shapes as declared.

torch 2.13: ``torch.export.export(strict=False)`` already returns pre-dispatch ATen; it needs
``fx.traceback.preserve_node_meta`` to keep annotations, and a graph signature names the parameters.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from torch import fx, nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.export.graph_signature import OutputKind

from .. import ir
from ..common.errors import CaptureError
from ..common.logs import log
from ..common.messages import first_line
from ..ir.promoting import promoting
from ..policy import Policy
from ..policy.scopes import inside_call, paths_of
from . import composites
from .dtype_reads import DtypeReads
from .origin import annotate_origin, holds_large_values
from .settings import capture_settings
from .twin import low_trace, sharing_copy


@dataclass(frozen=True)
class Exported:
    """A model as ``torch.export`` captures it: the program whose graph passes rewrite, and the graph's twin.

    ``twin_failed``: why the same code could not be traced in low precision, '' if it could.
    """

    program: torch.export.ExportedProgram
    twin: fx.GraphModule | None = None
    twin_failed: str = ""

    @property
    def graph(self) -> fx.GraphModule:
        found = self.program.graph_module
        assert isinstance(found, fx.GraphModule)
        return found


def capture_export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    low: torch.dtype | None = None,
    inference: bool = False,
    policy: Policy | None = None,
) -> Exported:
    """Export a module to pre-dispatch ATen, each node with its module path and source line.

    Parameters and buffers are the first inputs of the graph. With ``low``, the forward runs a second time, to make the
    graph's twin in that dtype (see ``twin.py``), unless it asks no tensor for its dtype. With ``inference``, the model
    is captured as in eval mode, and regions that only switch gradients on or off are inlined. With ``policy``, ops that
    it looks into are replaced by the ops inside of them (``composites.py``).

    What runs is a copy that shares the tensors: ``torch.export`` wraps the forward of every module that it traces and
    replaces its parameters by fakes, which another thread that calls the model would see.
    """
    with _traceable(model, inference) as traced:
        return _capture(traced, args, kwargs, dynamic_shapes, low, inference, policy)


@contextlib.contextmanager
def _traceable(model: nn.Module, inference: bool) -> Iterator[nn.Module]:
    """Yield a copy of the model that shares its tensors; if it cannot be copied, the model itself, restored on exit."""
    try:
        traced = sharing_copy(model)
    except Exception as error:  # the user's objects may refuse it: a lock, a generator, a tensor that is not a leaf
        log("capture", "the model cannot be copied and is traced itself: %s", first_line(error, named=True))
        traced = model
    before = [(module, dict(vars(module))) for module in model.modules()] if traced is model else []
    if inference:
        for module in traced.modules():
            module.training = False
    try:
        yield traced
    finally:
        for module, attributes in before:  # torch 2.13 leaves copies of lists and tuples behind
            vars(module).update(attributes)
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]


_REWRITE = (
    "If the inputs are right, rewrite that line, or use amp_compile, which runs code that cannot be in a graph outside "
    "of it."
)
_KEEPS_CACHE = (
    "Models of transformers return a cache, which torch.export does not know: set model.config.use_cache = False."
)


def _capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any,
    low: torch.dtype | None, inference: bool, policy: Policy | None,
) -> Exported:  # fmt: skip
    reads = DtypeReads()
    try:
        program = _export(model, args, kwargs, dynamic_shapes, inference, reads)
    except Exception as error:
        line = _users_line(error)
        raise CaptureError(
            f"{type(model).__name__} cannot be exported with these inputs: "
            f"{first_line(error)}{f' ({line})' if line else ''}",
            source=line,
            hint=_KEEPS_CACHE if "Cache in output" in str(error) else _REWRITE,
        ) from error
    _name_state(program, dict(model.named_parameters(remove_duplicate=False)))
    _expand(program, policy)
    if low is None or not reads.found:
        return Exported(program)
    try:
        with low_trace(low), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were shown when the program was made
            twin = _expand(_export(sharing_copy(model), args, kwargs, dynamic_shapes, inference), policy)
    except Exception as error:
        return Exported(program, None, first_line(error, named=True))
    return Exported(program, twin)


def capture_program(program: torch.export.ExportedProgram, policy: Policy | None = None) -> Exported:
    """Return an already exported program with the same annotations on its nodes as ``capture_export`` writes."""
    _annotate(program, {}, dict(program.state_dict))
    _name_state(program, dict(program.named_parameters()))
    _expand(program, policy)
    return Exported(program)


def _expand(program: torch.export.ExportedProgram, policy: Policy | None) -> fx.GraphModule:
    gm = program.graph_module
    assert isinstance(gm, fx.GraphModule)
    if policy is not None:
        composites.expand(gm, policy)
    return gm


def _name_state(program: torch.export.ExportedProgram, parameters: Mapping[str, torch.Tensor]) -> None:
    """Annotate each input that is a parameter or buffer with its path, and mark those that need a gradient."""
    signature = program.graph_signature
    for node in program.graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        path: str | None = signature.inputs_to_parameters.get(node.name)
        held = path or signature.inputs_to_buffers.get(node.name)
        if held is not None:
            node.meta[ir.PATH] = held
        if path is not None and path in parameters and parameters[path].requires_grad:
            node.meta[ir.PARAMETER] = True


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any, inference: bool,
    watch: contextlib.AbstractContextManager[Any] | None = None,
) -> torch.export.ExportedProgram:
    watch = watch or contextlib.nullcontext()
    settings = capture_settings(), torch._C._DisableAutocast(), inside_call()
    with contextlib.ExitStack() as stack:
        for setting in (torch.fx.traceback.preserve_node_meta(), *settings, watch, _quiet()):
            stack.enter_context(setting)
        program = torch.export.export(model, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False)
    if inference:
        assert isinstance(program.graph_module, fx.GraphModule)
        _inline_grad_regions(program.graph_module)
    _annotate(program, paths_of(model), dict(model.named_buffers(remove_duplicate=False)))
    return program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the graph that torch 2.13 prints on stderr when a trace fails, and nothing else."""
    said, graph = io.StringIO(), ""
    try:
        with contextlib.redirect_stderr(said):
            yield
    except Exception as error:
        graph = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        text = said.getvalue()
        text = text.replace(graph, "").lstrip("\n") if graph else text
        sys.stderr.write(text)


def _users_line(error: BaseException) -> str:
    """Return ``file:line in forward: code`` of the last frame that is neither torch's nor ours."""
    own = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*own, "<"))]
    if not frames or frames[-1].name == "<module>":
        return ""
    last = frames[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}: {last.line}"


def _annotate(
    program: torch.export.ExportedProgram, modules: Mapping[int, str], held: Mapping[str, torch.Tensor]
) -> None:
    """Annotate a program's nodes with what passes read: module paths, constants, which outputs replace which inputs."""
    for _, inner in ir.all_graphs(program.graph_module):
        for node in inner.graph.nodes:
            node.meta = dict(node.meta)  # in an export, a node inside a region may share its meta with one outside
        annotate_origin(inner, modules)
    gm = program.graph_module
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name in constants:
            node.meta[ir.CONSTANT] = program.constants[constants[node.name]]
    signature = program.graph_signature
    for node in gm.graph.nodes:
        path: str | None = signature.inputs_to_buffers.get(node.name) if node.op == "placeholder" else None
        if path is not None and path in held and holds_large_values(held[path]):
            node.meta[ir.CONSTANT] = held[path]
    places = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    buffers = {target: name for name, target in signature.inputs_to_buffers.items()}
    gm.meta[ir.STATE] = [
        (index, places.index(buffers[spec.target])) for index, spec in enumerate(signature.output_specs)
        if spec.kind is OutputKind.BUFFER_MUTATION and spec.target in buffers
    ]  # fmt: skip
    gm.meta[ir.OUTPUT_DTYPES] = ir.output_dtypes(gm)
    if _inline_regions(gm):
        _Repropagate(gm).run_on_fakes()
        gm.recompile()


# ---------------------------------------------------------------------------------- nested torch.autocast


def _inline_regions(gm: fx.GraphModule) -> bool:
    """``wrap_with_autocast(device, dtype, enabled, cache, body, *args)`` → ``_enter_autocast``, the body's nodes,
    ``_exit_autocast``. Dynamo writes regions like that too, so passes see one form, and none is left at run time."""
    found = False
    for node in list(gm.graph.nodes):
        if not ir.is_higher_order(node):
            continue
        bodies = [inner for _, inner in ir.subgraphs(gm, node)]
        for inner in bodies:
            found |= _inline_regions(inner)
        if ir.op_name(node) != "higher_order::wrap_with_autocast":
            continue
        with gm.graph.inserting_before(node):
            begin = gm.graph.call_function(_enter_autocast, node.args[:4])
            begin.meta = {k: v for k, v in node.meta.items() if k != "val"}
            end = gm.graph.call_function(_exit_autocast, (begin,))
        (body,) = bodies
        _inline(gm, node, body, node.args[4], node.args[5:], end)
        found = True
    if found:
        gm.recompile()
    return found


def _inline_grad_regions(gm: fx.GraphModule) -> None:
    """``wrap_with_set_grad_enabled(enabled, body, *args)`` → the body's nodes."""
    for node in list(gm.graph.nodes):
        if not ir.is_higher_order(node):
            continue
        bodies = [inner for _, inner in ir.subgraphs(gm, node)]
        for inner in bodies:
            _inline_grad_regions(inner)
        if ir.op_name(node) != "higher_order::wrap_with_set_grad_enabled":
            continue
        (body,) = bodies
        _inline(gm, node, body, node.args[1], node.args[2:], node)
    gm.recompile()


def _inline(
    gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule, holder: Any, given: Sequence[Any], before: fx.Node
) -> None:
    """Replace a region by the nodes of its body, inserted in front of ``before``. ``holder``: the node that names the
    body. ``given``: the values of the body's inputs."""
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(places, given, strict=True))
    read = {str(n.target) for n in body.graph.nodes if n.op == "get_attr"}
    for name, held in (*body.named_buffers(recurse=False), *body.named_children()):
        if name in read:
            assert not hasattr(gm, name), f"the constant {name} exists twice"
            if isinstance(held, torch.Tensor):
                gm.register_buffer(name, held)
            elif isinstance(held, nn.Module):
                gm.add_module(name, held)
    with gm.graph.inserting_before(before):
        results: Any = gm.graph.graph_copy(body.graph, values)
    flat = list(results) if isinstance(results, (tuple, list)) else [results]
    for user in list(node.users):
        assert ir.is_getitem(user), "a region returns a tuple"
        place: Any = user.args[1]
        user.replace_all_uses_with(flat[place])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    if isinstance(holder, fx.Node) and not holder.users:
        gm.graph.erase_node(holder)


class _Repropagate(fx.Interpreter):
    """Recomputes the fake values of nodes that were traced inside a region as if there were none: fp32, like others."""

    def run_on_fakes(self) -> None:
        assert isinstance(self.module, fx.GraphModule)
        nodes = list(self.module.graph.nodes)
        inputs = [n.meta.get("val") for n in nodes if n.op == "placeholder"]
        modes = (getattr(v, "fake_mode", None) for n in nodes for v in ir.tensor_outputs(n))
        mode = next((m for m in modes if m is not None), None)
        with mode or contextlib.nullcontext(), torch.no_grad():
            self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr" or ir.is_higher_order(n) or getattr(n.target, "__name__", "") in _REGION_ENDS:
            return n.meta.get("val", getattr(self.module, str(n.target), None) if n.op == "get_attr" else None)
        if n.op != "call_function" or n.target is torch.ops.aten._assert_tensor_metadata.default:
            return n.meta.get("val") if n.op != "output" else None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        in_place = ir.op_name(n).endswith("_")
        result = promoting(lambda a, k: n.target(*a, **k), args, kwargs, in_place)  # type: ignore[operator]
        if "val" in n.meta:
            n.meta["val"] = result
        return result


_REGION_ENDS = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")
