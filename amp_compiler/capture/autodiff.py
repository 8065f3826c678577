"""A rewritten forward graph → AOTAutograd → joint passes → something that runs.

Differentiation is torch's: the backward inherits the forward's precision by construction. Our joint passes
run where the whole graph is visible: in the partitioner when gradients are needed, in the inference
compiler when they are not. torch 2.13 internals: ``torch._dynamo.backends.common.aot_autograd``,
``torch._functorch.partitioners``, ``torch._inductor.compile_fx`` (no public hook sees the joint graph) and
``torch._C._DisableAutocast`` (a backward inside the user's autocast region must not be cast again).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

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
