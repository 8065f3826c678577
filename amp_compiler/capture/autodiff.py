"""A rewritten forward graph → AOTAutograd → joint passes → something that runs.

Differentiation is torch's: the backward inherits the forward's precision by construction. Our joint passes
run where the whole graph is visible: in the partitioner when gradients are needed, in the inference
compiler when they are not. torch 2.13 internals: ``torch._dynamo.backends.common.aot_autograd``,
``torch._functorch.partitioners``, ``torch._inductor.compile_fx`` (no public hook sees the joint graph) and
``torch._C._DisableAutocast`` (a backward inside the user's autocast region must not be cast again).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .. import graph as g
from ..errors import CaptureError

JointPasses = Callable[[fx.GraphModule, str], None]


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], backend: str, joint: JointPasses) -> Any:
    """Compile a forward graph; ``joint(graph, kind)`` is called with kind "joint" or "inference"."""
    compiler = _inductor if backend == "inductor" else _eager
    return compiler(gm, example_inputs, joint)


def _donate_nothing() -> None:
    """Saved tensors given away to the backward would make ``backward(retain_graph=True)`` fail, which works
    without us. torch 2.13 has no switch that survives until the backward runs, so clear the list it reads."""
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
    return compiler(gm, example_inputs)


def _runner(graph: fx.GraphModule) -> Any:
    forward = graph.forward

    def run(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()  # boxed: the graph may free each input after its last use
        with torch._C._DisableAutocast():
            return forward(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], joint: JointPasses) -> Any:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def before_joint_passes(graph: fx.Graph) -> None:
        owner = graph.owning_module
        assert owner is not None
        backward = any(n.op == "placeholder" and str(n.target).startswith("tangents") for n in graph.nodes)
        joint(owner, "joint" if backward else "inference")

    patches = {
        # without it Inductor keeps fp32 where the graph asks for a rounding to the low dtype
        "emulate_precision_casts": True,
        "joint_custom_pre_pass": before_joint_passes,
    }

    def inner(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        _donate_nothing()
        return compile_fx_inner(graph, inputs, **kwargs)

    return compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=patches)


# ------------------------------------------------------------------------------- a whole training step


def joint_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], state: set[int], decompositions: Any = None
) -> fx.GraphModule:
    """The joint graph of a forward graph whose output ``gm.meta[LOSS]`` is the loss, flat, each input and output with
    its ``Role``. ``state``: the inputs that are the model's own, which a skipped update must leave as they were.

    torch 2.13 internals: ``aot_export_joint_with_descriptors`` (the one entrance to AOTAutograd that gives the joint
    graph with input mutations as outputs) and its descriptors, which say what each input and output is.
    """
    import torch._functorch._aot_autograd.descriptors as d
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    _detach_all_but(gm, gm.meta[g.LOSS])
    with contextlib.ExitStack() as stack:
        exported = aot_export_joint_with_descriptors(stack, gm, tuple(example_inputs), decompositions=decompositions)
        joint = exported.graph_module
    places = [n for n in joint.graph.nodes if n.op == "placeholder"]
    for node in places:
        node.meta[g.ROLE] = _input_role(node.meta["desc"], d)
    last = next(iter(reversed(joint.graph.nodes)))
    results = pytree.tree_leaves(last.args[0], is_leaf=lambda x: x is None)
    roles = [_output_role(desc, d) for desc in last.meta["desc"]]
    kept = [(role, result) for role, result in zip(roles, results, strict=True) if role is not None]
    last.args = (tuple(result for _, result in kept),)
    joint.meta[g.ROLE] = tuple(role for role, _ in kept)
    replaced = dict(gm.meta.get(g.STATE, ()))
    joint.meta[g.RESTORED] = [
        (role, role.index if role.kind == "mutation" else replaced[role.index])
        for role, _ in kept
        if (role.kind == "mutation" and role.index in state) or (role.kind == "output" and role.index in replaced)
    ]
    joint.graph.set_codegen(fx.graph.CodeGen())  # flat arguments instead of (primals, tangents)
    joint.recompile()
    return joint


def _detach_all_but(gm: fx.GraphModule, loss: int) -> None:
    """Only the loss is differentiated; what else leaves the graph (``self.last = hidden``) is a value."""
    last = next(iter(reversed(gm.graph.nodes)))
    results = pytree.tree_leaves(last.args[0], is_leaf=lambda x: x is None)
    for place, node in enumerate(results):
        value = g.tensor_of(node) if isinstance(node, fx.Node) else None
        if place != loss and value is not None and value.dtype.is_floating_point:
            with gm.graph.inserting_before(last):
                results[place] = gm.graph.call_function(torch.ops.aten.detach.default, (node,))
            results[place].meta["val"] = value.detach()
    last.args = (tuple(results),)
    gm.recompile()


def _input_role(desc: Any, d: Any) -> g.Role:
    if isinstance(desc, d.PlainAOTInput):
        return g.Role("primal", desc.idx)
    if isinstance(desc, (d.BufferAOTInput, d.ParamAOTInput)):
        return g.Role("constant", name=desc.target)
    if isinstance(desc, d.TangentAOTInput) and isinstance(desc.output, d.PlainAOTOutput):
        return g.Role("tangent", desc.output.idx)
    raise CaptureError(f"the training step has an input that cannot be in one graph: {desc.expr()}")


def _output_role(desc: Any, d: Any) -> g.Role | None:
    if desc is None:
        return None
    if isinstance(desc, d.PlainAOTOutput):
        return g.Role("output", desc.idx)
    if isinstance(desc, d.InputMutationAOTOutput) and isinstance(desc.mutated_input, d.PlainAOTInput):
        return g.Role("mutation", desc.mutated_input.idx)
    if isinstance(desc, d.GradAOTOutput):
        of = desc.grad_of
        return g.Role("gradient", of.idx) if isinstance(of, d.PlainAOTInput) else None
    raise CaptureError(f"the training step has an output that cannot be in one graph: {desc.expr()}")
