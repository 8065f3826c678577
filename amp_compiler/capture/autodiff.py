"""Take a rewritten forward graph through AOTAutograd and the joint passes to something that runs.

Differentiation is torch's: the backward inherits the forward's precision by construction. Our joint passes
run where the whole graph is visible: in the partitioner when gradients are needed, in the inference
compiler when they are not. torch 2.13 internals: ``torch._dynamo.backends.common.aot_autograd``,
``torch._functorch.partitioners``, ``torch._inductor.compile_fx`` (no public hook sees the joint graph) and
``torch._C._DisableAutocast`` (a backward inside the user's autocast region must not be cast again).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..common.errors import ArgumentError, CaptureError
from ..common.torch_names import is_any_autocast_enabled, pytree
from . import inductor, undifferentiated
from .straight import straight_line

JointPasses = Callable[[fx.GraphModule, str], None]


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], backend: str, joint: JointPasses) -> Any:
    """Compile a forward graph; ``joint(graph, kind)`` is called with kind "joint" or "inference"."""
    compiler = _inductor if backend == "inductor" else _eager
    return compiler(gm, example_inputs, joint)


def _donate_nothing() -> None:
    """Keep saved tensors from being donated to the backward: ``backward(retain_graph=True)``, which works without us,
    would fail. torch 2.13 has no switch that survives until the backward runs, so clear the list that it reads."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _eager(gm: fx.GraphModule, example_inputs: Sequence[Any], joint: JointPasses) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    def partition(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        joint(graph, "joint")
        return default_partition(graph, *args, **kwargs)

    def inference(graph: fx.GraphModule, inputs: Any) -> Any:
        joint(graph, "inference")
        return _runner(graph)

    if undifferentiated.is_plain_inference(gm, example_inputs):
        inner = inference(undifferentiated.functional(gm), example_inputs)
        return lambda *args: inner(list(args))

    def forward(graph: fx.GraphModule, inputs: Any) -> Any:
        _donate_nothing()
        return _runner(graph)

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: _runner(graph),
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    compiled = compiler(gm, example_inputs)
    # without ``torch._dynamo.disable`` around it: Dynamo puts one around every callable that a backend returns
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)


def _runner(graph: fx.GraphModule) -> Any:
    inner = boxed(graph)

    def run(args: list[Any]) -> Any:
        if not is_any_autocast_enabled():
            return inner(args)
        with torch._C._DisableAutocast():
            return inner(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def boxed(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a function that runs a graph on a list of its inputs and empties the list, so that the graph may free each
    input after its last use."""
    found = straight_line(graph)
    if found is not None:
        return found

    def run(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        return graph(*values)

    return run


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], joint: JointPasses) -> Any:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def before_joint_passes(graph: fx.Graph) -> None:
        owner = graph.owning_module
        assert owner is not None
        backward = any(n.op == "placeholder" and str(n.target).startswith("tangents") for n in graph.nodes)
        joint(owner, "joint" if backward else "inference")
        inductor.prepare(graph, inference=not backward)

    patches = {
        # otherwise Inductor keeps fp32 where the graph asks for rounding to the low-precision dtype
        "emulate_precision_casts": True,
        "joint_custom_pre_pass": before_joint_passes,
    }

    def inner(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        _donate_nothing()
        with inductor.generating():
            return compile_fx_inner(graph, inputs, **kwargs)

    return compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=patches)


# ------------------------------------------------------------------------------- a whole training step


def joint_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], state: set[int], decompositions: Any = None
) -> fx.GraphModule:
    """Return the joint graph of a forward graph whose output ``gm.meta[LOSS]`` is the loss. It has flat inputs and
    outputs, each with its ``Role``. ``state``: the inputs that belong to the model, which a skipped update must not
    change.

    torch 2.13 internals: ``aot_export_joint_with_descriptors`` (the only entry point of AOTAutograd that returns the
    joint graph with input mutations as outputs) and its descriptors, which say what each input and output is.
    """
    import torch._functorch._aot_autograd.descriptors as d
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    _detach_all_but(gm, gm.meta[ir.LOSS])
    with contextlib.ExitStack() as stack:
        if decompositions is not None:  # Inductor: its code for GPUs rounds only what was marked while tracing
            stack.enter_context(torch._inductor.config.patch("emulate_precision_casts", True))
        exported = aot_export_joint_with_descriptors(stack, gm, tuple(example_inputs), decompositions=decompositions)
        joint = exported.graph_module
    places = [n for n in joint.graph.nodes if n.op == "placeholder"]
    for node in places:
        node.meta[ir.ROLE] = _input_role(node.meta["desc"], d)
    if not any(node.meta[ir.ROLE].kind == "tangent" for node in places):
        raise ArgumentError(
            "The loss does not depend on any parameter that requires a gradient: check that the model is not frozen "
            "and the loss is not detached."
        )
    last = next(iter(reversed(joint.graph.nodes)))
    results = pytree.tree_leaves(last.args[0], is_leaf=lambda x: x is None)
    roles = [_output_role(desc, d) for desc in last.meta["desc"]]
    kept = [(role, node) for role, node in zip(roles, results, strict=True) if role is not None and node is not None]
    kept = [(role, _copied(joint.graph, node) if role == ir.Role("output", gm.meta[ir.LOSS]) else node)
            for role, node in kept]  # fmt: skip
    last.args = (tuple(result for _, result in kept),)
    joint.meta[ir.ROLE] = tuple(role for role, _ in kept)
    joint.meta[ir.RESTORED] = [role for role, _ in kept if role.kind == "mutation" and role.index in state]
    joint.meta[ir.LOSS] = gm.meta[ir.LOSS]
    joint.graph.set_codegen(fx.graph.CodeGen())  # flat arguments instead of (primals, tangents)
    joint.recompile()
    return joint


def _copied(graph: fx.Graph, loss: fx.Node) -> fx.Node:
    """Copy the loss to memory of its own: the one number of torch's ``mse_loss`` keeps the memory of all its terms."""
    with graph.inserting_after(loss):
        copy = graph.call_function(torch.ops.aten.clone.default, (loss,))
    copy.meta = dict(loss.meta)
    return copy


def decompositions_for(backend: str) -> Any:
    """Return the decompositions that the backend needs."""
    if backend != "inductor":
        return None
    import torch._inductor.lowering  # noqa: F401  torch 2.13: max_pool2d's decomposition reads it without an import
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _detach_all_but(gm: fx.GraphModule, loss: int) -> None:
    """Detach every output but the loss: only the loss is differentiated, not others such as ``self.last = hidden``."""
    last = next(iter(reversed(gm.graph.nodes)))
    results = pytree.tree_leaves(last.args[0], is_leaf=lambda x: x is None)
    for place, node in enumerate(results):
        value = ir.tensor_of(node) if isinstance(node, fx.Node) else None
        if place != loss and value is not None and (value.dtype.is_floating_point or value.dtype.is_complex):
            with gm.graph.inserting_before(last):
                results[place] = gm.graph.call_function(torch.ops.aten.detach.default, (node,))
            results[place].meta["val"] = value.detach()
    last.args = (tuple(results),)
    gm.recompile()


def _input_role(desc: Any, d: Any) -> ir.Role:
    if isinstance(desc, d.PlainAOTInput):
        return ir.Role("primal", desc.idx)
    if isinstance(desc, (d.BufferAOTInput, d.ParamAOTInput)):
        return ir.Role("constant", name=desc.target)
    if isinstance(desc, d.TangentAOTInput) and isinstance(desc.output, d.PlainAOTOutput):
        return ir.Role("tangent", desc.output.idx)
    raise CaptureError(f"the training step has an input that cannot be in one graph: {desc.expr()}")


def _output_role(desc: Any, d: Any) -> ir.Role | None:
    if desc is None:
        return None
    if isinstance(desc, d.PlainAOTOutput):
        return ir.Role("output", desc.idx)
    if isinstance(desc, d.InputMutationAOTOutput) and isinstance(desc.mutated_input, d.PlainAOTInput):
        return ir.Role("mutation", desc.mutated_input.idx)
    if isinstance(desc, d.GradAOTOutput):
        of = desc.grad_of
        return ir.Role("gradient", of.idx) if isinstance(of, d.PlainAOTInput) else None
    raise CaptureError(f"the training step has an output that cannot be in one graph: {desc.expr()}")


def compile_joint(joint: fx.GraphModule, backend: str) -> Callable[[list[Any]], Any]:
    """Return a function of a list of the joint graph's inputs, which it empties, that runs it: as a whole, or, where
    the user's checkpointing asks for values to be computed again in the backward, as torch's partitioner divides it.

    torch 2.13 internals: ``default_partition`` (it reads the tags that checkpointing leaves on nodes) and, for
    Inductor, ``joint_graph_passes`` and ``compile_fx_inner``, which accept a graph as it is.
    """
    if not any("recompute" in node.meta for node in joint.graph.nodes):
        return _callable(joint, backend)
    forward, backward = _divide(joint)
    made = _names(pytree.tree_leaves(next(iter(reversed(forward.graph.nodes))).args[0]))
    inputs = [n.name for n in joint.graph.nodes if n.op == "placeholder"]
    takes = [n.name for n in forward.graph.nodes if n.op == "placeholder"]
    reads = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
    run_forward, run_backward = _callable(forward, backend), _callable(backward, backend)
    places = _places(joint)

    def run(args: list[Any]) -> list[Any]:
        given = dict(zip(inputs, args, strict=True))
        args.clear()
        values = run_forward([given[name] for name in takes])
        loss = values[0]
        given.update(zip(made, values, strict=True))
        needed = [given[name] for name in reads]
        given.clear()
        del values
        results = [loss, *run_backward(needed)]
        return [results[place] for place in places]

    return run


def _names(results: Sequence[fx.Node]) -> list[str]:
    """Return the names by which the backward knows the forward's results: it numbers the states of the random
    generators that recomputed dropout needs."""
    states = itertools.count()

    def is_state(node: fx.Node) -> bool:
        source = node.args[0] if ir.is_getitem(node) else None
        return isinstance(source, fx.Node) and "rng_state" in ir.op_name(source)

    return [f"rng_state_output_{next(states)}" if is_state(node) else node.name for node in results]


def _places(joint: fx.GraphModule) -> list[int]:
    """Return the position of each output of the joint graph when the loss is moved to the front."""
    roles = joint.meta[ir.ROLE]
    loss = roles.index(ir.Role("output", joint.meta[ir.LOSS]))
    order = [loss, *(i for i in range(len(roles)) if i != loss)]
    return [order.index(i) for i in range(len(roles))]


def _divide(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    from torch._functorch.partitioners import default_partition

    places = _places(joint)
    whole = ir.copy_graph(joint)
    last = next(iter(reversed(whole.graph.nodes)))
    results = pytree.tree_leaves(last.args[0])
    last.args = (tuple(results[places.index(i)] for i in range(len(results))),)  # the loss is the forward's only output
    last.meta.pop("desc", None)
    whole.recompile()
    inputs = [n.meta["val"] for n in whole.graph.nodes if n.op == "placeholder"]
    forward, backward = default_partition(whole, inputs, num_fwd_outputs=1)
    return forward, backward


def _callable(gm: fx.GraphModule, backend: str) -> Callable[[list[Any]], Any]:
    if backend != "inductor":
        return boxed(gm)
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    gm = ir.copy_graph(gm)  # Inductor changes its input
    inductor.prepare(gm.graph, inference=False)
    inductor.keep_strides(gm.graph)
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    with V.set_fake_mode(ir.fake_mode(gm.graph)), torch._inductor.config.patch("emulate_precision_casts", True):
        joint_graph_passes(gm)  # Inductor has no code for random ops before these
        with inductor.generating():
            compiled: Any = compile_fx_inner(gm, inputs)
    run: Callable[[list[Any]], Any] = compiled
    return run
