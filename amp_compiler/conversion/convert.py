"""``convert_model``: export, rewrite, round the weights."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from .. import ir
from ..capture.export import Exported, capture_export
from ..capture.program import Frame, flat_inputs, foreign_ops, plain_spec, rebuild, weights_of
from ..common.errors import AmpWarning, ArgumentError, CaptureError
from ..common.messages import users_frame
from ..common.torch_names import pytree
from ..common.version import __version__
from ..inspect.report import build_report, cast_totals, graph_rows
from ..ir.nesting import compiled_policy
from ..ir.weights import Weight, Weights, drop_unread
from ..passes import order
from ..policy import Policy, dtype_name
from ..policy.ops.names import OpLike
from ..policy.scopes import marked_modules, modules_of
from ..rewrite.base import Context
from ..rewrite.records import Record, record
from ..runtime.arguments import check_request
from .converted import ConvertedModel
from .details import Details
from .fp32_form import Fp32Form


def convert_model(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    level: str = "O2",
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | None = None,
    white_list: Iterable[OpLike] = (),
    black_list: Iterable[OpLike] = (),
    conditional_fp32_ops: Iterable[tuple[OpLike, str, Iterable[Any]]] = (),
    exclude: Iterable[str | type[nn.Module]] = (),
    cast_params: bool = True,
    keep_io_dtypes: bool = True,
    dynamic_shapes: Any = None,
    disable_passes: Iterable[str] = (),
) -> ConvertedModel:
    """Convert a trained fp32 model into a mixed-precision program for inference, to call, save or pass on.

    Batch norm is folded into the layer before it, and dropout is removed; ``disable_passes`` switches that off. The
    model is not modified and shares no memory with the result.

    Args:
        model: The model. One in training mode is converted as in eval mode, with a warning.
        args: Example inputs, as a tuple of positional arguments.
        kwargs: Example inputs, as keyword arguments.
        level: As for ``amp_compile``.
        dtype: As for ``amp_compile``.
        policy: As for ``amp_compile``.
        white_list: As for ``amp_compile``.
        black_list: As for ``amp_compile``.
        conditional_fp32_ops: Triples ``(op, argument, values)``: run the op in fp32 where the argument has one of the
            values.
        exclude: As for ``amp_compile``.
        cast_params: Store each weight in the precision in which it is used. If False, weights stay fp32 and are cast in
            each call.
        keep_io_dtypes: Keep the dtypes of inputs and outputs. If False, outputs have the dtypes in which they are
            computed, and a float input that is only used in low precision is expected in low precision.
        dynamic_shapes: The sizes that may change, as for ``torch.export.export``.
        disable_passes: As for ``amp_compile``.

    Returns:
        A ``ConvertedModel``.

    Raises:
        CaptureError: If ``torch.export`` cannot capture the model with these inputs.

    Examples:
        >>> import torch
        >>> from amp_compiler import convert_model
        >>> converted = convert_model(torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),), dtype=torch.bfloat16)
        >>> converted(torch.ones(3, 4)).dtype, converted.exported_program.state_dict["weight"].dtype
        (torch.float32, torch.bfloat16)
    """
    request = check_request(level, dtype, policy, white_list, black_list, exclude, "eager", disable_passes)
    model, args, kwargs = _check_inputs(model, args, kwargs)
    chosen = request.policy_for(model).with_conditional(conditional_fp32_ops)
    disabled = request.disable_passes
    steps = order.build(disabled)
    start = time.perf_counter()
    _warn_of_train_mode(model)
    untouched = not chosen.rewrites and not any(map(compiled_policy, model.modules()))
    low = None if untouched or "mark_dtype_origin" in disabled else chosen.low
    captured = capture_export(model, args, kwargs, dynamic_shapes, low=low, inference=True, policy=chosen)
    gm, weights = captured.graph, weights_of(captured.program)
    weights.store_low = cast_params and "freeze_parameters" not in disabled
    ctx = Context(chosen, keep_io_dtypes, marked_modules(modules_of(model)), captured.twin, weights=weights)
    if captured.twin_failed:
        ctx.notes.append(
            f"the model's code could not be traced in {dtype_name(chosen.low)}, so every cast in it to float32 counts "
            f"as the author's: {captured.twin_failed}"
        )
    history = [record("capture", time.perf_counter() - start, True, gm, "convert", [])]
    fp32_bytes = _stored_bytes(gm.graph, weights)
    known = steps.prepare.run(gm, ctx, history, graph="convert")
    drop_unread(gm.graph, weights)
    original = Fp32Form(Frame.of(captured.program), ir.copy_graph(gm), weights.names_only())
    steps.convert.run(gm, ctx, history, graph="convert", after="prepare", known=known)
    return _finished(captured, ctx, original, history, fp32_bytes, cast_params, disabled)


def _finished(
    captured: Exported, ctx: Context, original: Fp32Form, history: list[Record], fp32_bytes: int,
    cast_params: bool, disabled: tuple[str, ...],
) -> ConvertedModel:  # fmt: skip
    gm, weights, policy = captured.graph, ctx.weights, ctx.policy
    assert weights is not None
    rows = graph_rows(gm, 0)
    example = captured.program.example_inputs
    if not ctx.keep_output_dtypes:
        example = _take_low_inputs(gm, weights, *flat_inputs(captured.program))
    stored_bytes = _stored_bytes(gm.graph, weights)
    inputs = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    rounded = tuple(
        path for name, path in original.fp32_weights()
        if inputs[weights.stored.get(name, name)].meta["val"].dtype in ir.LOW_DTYPES
    )  # fmt: skip
    notes = [f"{path} stays in float32: {why}" for path, why in weights.kept.items()]
    notes.append(f"weights: {fp32_bytes:,} bytes in fp32, {stored_bytes:,} bytes stored")
    report = build_report(
        rows, [cast_totals(gm)], level=policy.level, dtype=policy.low, notes=(*ctx.notes, *notes), stages=history
    )
    for note in ctx.notes:
        warnings.warn(f"amp_compiler: {note}.", AmpWarning, stacklevel=users_frame())
    details = Details(
        policy, report, fp32_bytes, stored_bytes, rounded, tuple(weights.kept.items()), cast_params,
        ctx.keep_output_dtypes, disabled, __version__,
    )  # fmt: skip
    original.stored = dict(weights.stored)
    spec = captured.program.call_spec.out_spec
    program = rebuild(Frame.of(captured.program), gm.graph, _own_values(), weights, out_spec=plain_spec(spec),
                      example_inputs=example)  # fmt: skip
    foreign = foreign_ops(program)
    if foreign:
        details_note = ", ".join(foreign)
        warnings.warn(
            f"The model uses ops that are not part of torch ({details_note}): loading a saved file needs the package "
            "that defines them.", AmpWarning, stacklevel=users_frame(),
        )  # fmt: skip
    return ConvertedModel(program, details, original, history, out_spec=spec)


def _own_values() -> Any:
    """Return a function that copies weights, so that they share no memory with the model; tied weights stay tied."""
    made: dict[Any, torch.Tensor] = {}

    def make(node: fx.Node, weight: Weight) -> torch.Tensor:
        with torch.no_grad():
            value = weight.make().detach()
            key = weight.source, value.dtype, value.shape, value.stride()
            if weight.source is None:
                return value if weight.fresh else value.clone()
            if key not in made:
                made[key] = value if weight.fresh else value.clone()
            return made[key]

    return make


def _stored_bytes(graph: fx.Graph, weights: Weights) -> int:
    """Return the bytes of all weights that the graph reads, counting tied weights once."""
    sizes: dict[Any, int] = {}
    for node in graph.nodes:
        if node in weights and node.users:
            value = node.meta["val"]
            sizes[weights[node].source or node.name, value.dtype] = ir.nbytes(value)
    return sum(sizes.values())


def _take_low_inputs(gm: fx.GraphModule, weights: Weights, flat: list[Any], spec: Any) -> Any:
    """For ``keep_io_dtypes=False``: expect an fp32 input that is only read rounded in low precision. Returns matching
    example inputs, made from ``flat`` and ``spec``."""
    users = [n for n in gm.graph.nodes if n.op == "placeholder" and n not in weights]
    written = ir.written_nodes(gm.graph)
    for place, node in enumerate(users):
        value = ir.tensor_of(node)
        if value is None or value.dtype is not torch.float32 or node in written or not node.users:
            continue
        dtypes = {ir.cast_dtype(u) if ir.is_float_cast(u) else None for u in node.users}
        low = next(iter(dtypes))
        if len(dtypes) != 1 or low not in ir.LOW_DTYPES or any("output" in (u.op for u in c.users) for c in node.users):
            continue
        node.meta["val"] = ir.retype(value, low)
        for cast in list(node.users):
            cast.replace_all_uses_with(node)
            gm.graph.erase_node(cast)
        if place < len(flat) and isinstance(flat[place], torch.Tensor):
            flat[place] = flat[place].to(low)
    gm.recompile()
    return pytree.tree_unflatten(flat, spec)


# ------------------------------------------------------------------------------------------------- arguments


def _check_inputs(model: Any, args: Any, kwargs: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if compiled_policy(model) is not None:
        model = model.original
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"convert_model takes a torch.nn.Module, not {type(model).__name__}. Call a function in a module's forward."
        )
    if isinstance(args, list):
        args = tuple(args)
    if not isinstance(args, tuple):
        hint = "write (x,)" if isinstance(args, torch.Tensor) else "a dict of inputs goes to kwargs"
        raise ArgumentError(f"args must be a tuple of example inputs, not {type(args).__name__}: {hint}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentError(f"kwargs must be a dict of example inputs by name, not {type(kwargs).__name__}.")
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise ArgumentError(f"{path} is on the meta device and has no values: load the weights before converting.")
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise CaptureError("A TorchScript module cannot be exported: convert the Python model it was made from.")
    return model, args, dict(kwargs or {})


def _warn_of_train_mode(model: nn.Module) -> None:
    if any(module.training for module in model.modules()):
        warnings.warn(
            f"{type(model).__name__} is in train mode and is converted as in eval mode: dropout does nothing and batch "
            "norm uses its running statistics. Call model.eval() first to silence this warning.",
            AmpWarning, stacklevel=users_frame(),
        )  # fmt: skip
