"""Small graphs without Dynamo, and the check that every pass test goes through.

``pre_dispatch`` and ``exported`` give graphs as the forward passes take them, ``functional`` and ``joint`` as
``fold_casts`` takes them. ``check_pass`` runs one pass and checks all that a pass promises.
"""

from __future__ import annotations

import copy
import itertools
import operator
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx.traceback
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from amp_compiler import Policy, ir
from amp_compiler.capture.export import capture_export
from amp_compiler.capture.origin import annotate_origin
from amp_compiler.inspect.data import Row
from amp_compiler.inspect.profile import CastCount, count_casts
from amp_compiler.inspect.report import graph_rows
from amp_compiler.passes import insert_casts, mark_dtype_origin, normalize, order, precision
from amp_compiler.policy.scopes import marked_modules, modules_of
from amp_compiler.rewrite.base import Context, Pass
from amp_compiler.rewrite.verify import verify

aten: Any = torch.ops.aten
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LEVELS = ("O0", "O1", "auto", "O2", "O3")
LOW = (BF16, F16)
FORWARD = (normalize.PASS, mark_dtype_origin.PASS, precision.PASS, insert_casts.PASS)


def context(
    level: str = "O2",
    dtype: torch.dtype = BF16,
    *,
    policy: Policy | None = None,
    keep: bool = True,
    modules: Any = None,
) -> Context:
    """A pass context at a level, or with a given policy."""
    return Context(policy or Policy(level, dtype), keep, modules or {})


# ---------------------------------------------------------------------------------------------- graphs


def fakes(*inputs: Any, mode: FakeTensorMode | None = None) -> tuple[FakeTensorMode, list[Any]]:
    """A fake mode and the inputs as its fakes; non-tensors are passed through."""
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    return mode, [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs]


def pre_dispatch(fn: Callable[..., Any], *inputs: Any, parameters: Sequence[int] = ()) -> fx.GraphModule:
    """``fn`` in pre-dispatch ATen with its annotations (``precision`` scopes), without source lines.

    ``parameters``: positions of inputs that count as parameters.
    """
    mode, given = fakes(*inputs)
    with (
        mode,
        torch.no_grad(),
        torch.fx.traceback.preserve_node_meta(),
        mock.patch.object(torch.compiler, "_is_compiling_flag", True),  # what precision scopes look at
    ):
        gm = make_fx(fn, pre_dispatch=True)(*given)
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for index in parameters:
        places[index].meta[ir.PARAMETER] = True
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def exported(model: nn.Module, *inputs: Any, dynamic_shapes: Any = None) -> fx.GraphModule:
    """A module's graph from the export front end: parameters first, with module paths and source lines."""
    return capture_export(model, inputs, dynamic_shapes=dynamic_shapes).graph


def functional(fn: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> fx.GraphModule:
    """``fn`` as functional ATen, casts spelled ``_to_copy``, as AOTAutograd's inference graphs are."""
    with torch.no_grad():
        gm = make_fx(fn, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    return gm


def joint(fn: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> fx.GraphModule:
    """Outputs and gradients of ``fn(*inputs).sum()`` in one functional graph."""

    def both(*args: torch.Tensor) -> Any:
        leaves = [a.detach().requires_grad_(a.is_floating_point()) for a in args]
        out = fn(*leaves)
        grads = torch.autograd.grad(
            out.float().sum(), [a for a in leaves if a.requires_grad], allow_unused=True
        )
        return out, [x for x in grads if x is not None]

    return make_fx(both, tracing_mode="fake")(*inputs)


def step_graph(fn: Callable[..., Any], *inputs: torch.Tensor, state: Sequence[int] = ()) -> fx.GraphModule:
    """The joint graph of a training step: ``fn`` gives the loss first; inputs that need a gradient are parameters."""
    from amp_compiler.capture.autodiff import joint_graph

    gm = pre_dispatch(fn, *inputs)
    gm.meta[ir.LOSS] = 0
    graph = joint_graph(gm, inputs, set(state))
    graph.meta[ir.PARAMETER] = {i for i, x in enumerate(inputs) if x.requires_grad}
    for node in graph.graph.nodes:
        if node.op == "placeholder" and node.meta[ir.ROLE].kind == "primal":
            node._rename(f"p{node.meta[ir.ROLE].index}")
    return graph


def run_step(
    gm: fx.GraphModule, *inputs: torch.Tensor, sums: Mapping[int, torch.Tensor] | None = None, scale: float = 1024.0
) -> dict[ir.Role, torch.Tensor]:
    """Run the joint graph of a training step: each output by its role. ``sums``: the gradients so far, by parameter."""
    known = {"tangent": torch.ones(()), "scale": torch.tensor(scale), "found": torch.zeros(1)}
    values = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            role = node.meta[ir.ROLE]
            if role.kind == "sum":
                assert sums is not None
                values.append(sums[role.index])
            else:
                values.append(inputs[role.index].detach() if role.kind == "primal" else known[role.kind])
    return dict(zip(gm.meta[ir.ROLE], gm(*values), strict=True))


def by_kind(results: Mapping[ir.Role, torch.Tensor]) -> dict[str, dict[int, torch.Tensor]]:
    """The outputs of ``run_step``: kind -> place of the input that they belong to -> value."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for role, value in results.items():
        found.setdefault(role.kind, {})[role.index] = value
    return found


def one_op(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None, *, through: Any = None
) -> fx.GraphModule:
    """A graph of one call on fakes; each tensor among ``args`` becomes an input of the graph.

    ``through``: a function (graph, node) -> node put between an input and the call.
    """
    graph = fx.Graph()
    tensors: dict[int, fx.Node] = {}

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in tensors:
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["val"] = value
            tensors[id(value)] = node
        return tensors[id(value)]

    placed = pytree.tree_map(place, tuple(args))
    named = pytree.tree_map(place, dict(kwargs or {}))
    if through is not None:
        moved = {node: through(graph, node) for node in tensors.values()}
        placed, named = pytree.tree_map_only(fx.Node, moved.__getitem__, (placed, named))
    call = graph.call_function(target, placed, named)
    mode = next(
        m for v in pytree.tree_leaves((args, kwargs)) if (m := getattr(v, "fake_mode", None)) is not None
    )
    with mode, torch.no_grad():
        call.meta["val"] = target(*args, **(kwargs or {}))
    values = call.meta["val"]
    if isinstance(values, (tuple, list)):
        outs = []
        for index, value in enumerate(values):
            item = graph.call_function(operator.getitem, (call, index))
            item.meta["val"] = value
            outs.append(item)
        graph.output(tuple(outs))
    else:
        graph.output(call)
    return fx.GraphModule(nn.Module(), graph)


def autocast_region(
    gm: fx.GraphModule, first: str, last: str, dtype: Any = BF16, enabled: bool = True
) -> None:
    """Put ``first`` … ``last`` into an autocast region as Dynamo writes it: values stay as traced."""
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

    graph = gm.graph
    with graph.inserting_before(find(gm, first)):
        enter = graph.call_function(_enter_autocast, ("cpu", dtype, enabled, None))
    with graph.inserting_after(find(gm, last)):
        graph.call_function(_exit_autocast, (enter,))
    gm.recompile()


def find(gm: fx.GraphModule, name: str) -> fx.Node:
    """The node of that name."""
    return next(n for n in gm.graph.nodes if n.name == name)


def ops(gm: fx.GraphModule, op: str) -> list[fx.Node]:
    """All nodes of an op, by its plain name."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and ir.op_name(n) == op]


def casts(gm: fx.GraphModule) -> list[fx.Node]:
    """All casts between float dtypes."""
    return [n for n in gm.graph.nodes if ir.is_float_cast(n)]


def with_paths(gm: fx.GraphModule, model: nn.Module) -> fx.GraphModule:
    """Module paths as ``named_modules`` has them, for graphs that were not made by a front end."""
    annotate_origin(gm, {id(m): name for name, m in model.named_modules()})
    return gm


# ----------------------------------------------------------------------------------------------- checks


def same(ours: Any, theirs: Any, *, tolerance: float | None = None) -> None:
    """Equal outputs: dtype, shape and every bit that ``torch.equal`` sees, NaN equal to NaN."""
    left, right = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    assert len(left) == len(right)
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if not isinstance(a, torch.Tensor):
            assert a == b, f"output {index}: {a} against {b}"
            continue
        assert a.dtype == b.dtype, f"output {index}: {a.dtype} against {b.dtype}"
        if tolerance is None:
            assert a.shape == b.shape
            torch.testing.assert_close(
                a, b, rtol=0, atol=0, equal_nan=True, msg=lambda m, i=index: f"output {i}: {m}"
            )
        else:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def fresh(values: Any) -> Any:
    """Copies of the inputs, strides kept, so that a graph that writes to them leaves ours alone."""

    def twin(value: torch.Tensor) -> torch.Tensor:
        if value.is_sparse or any(s == 0 for s in value.stride()):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value)

    return pytree.tree_map_only(torch.Tensor, twin, values)


def in_turn(*values: Sequence[Any]) -> list[Any]:
    """Parameters of a test: all combinations of the values. Without the marker ``zoo``, only every second one, chosen
    so that, of three or more kinds of values, any two values still occur together."""
    return [
        pytest.param(*(v for _, v in case), marks=[] if sum(i for i, _ in case) % 2 == 0 else [pytest.mark.zoo])
        for case in itertools.product(*(enumerate(v) for v in values))
    ]


def each(names: Iterable[str], check: Callable[[str], None]) -> None:
    """``check`` of every name, for many small checks of one compilation; the failure lists all names that fail."""
    wrong = {}
    for name in names:
        try:
            check(name)
        except AssertionError as error:
            wrong[name] = error
    assert not wrong, "\n\n".join(f"{name}: {error}" for name, error in wrong.items())


def annotations(gm: fx.GraphModule) -> list[tuple[str, Any, Any]]:
    """What passes write beside the graph: decision and region of every node, subgraphs included."""
    return [
        (f"{name}.{n.name}", n.meta.get(ir.META), n.meta.get(ir.REGION))
        for name, inner in ir.all_graphs(gm) for n in inner.graph.nodes
    ]  # fmt: skip


def check_pass(
    pass_: Pass,
    gm: fx.GraphModule,
    ctx: Context | None = None,
    expected_text: str | None = None,
    *,
    inputs: Sequence[Any] | None = None,
    reference: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    modified: bool | None = None,
) -> fx.GraphModule:
    """Run a pass and check everything that it promises; returns the graph, changed in place.

    ``inputs``: also run it, and compare with ``reference`` (the graph before the pass, unless given) in every
    bit, or within ``tolerance``. ``modified``: what the pass must say that it did.
    """
    ctx = ctx or context()
    verify(gm, pass_.requires, ctx, "the test's own graph", deep=False)
    before = copy.deepcopy(gm) if inputs is not None and reference is None else None
    text_before, notes_before = ir.format_graph(gm), annotations(gm)
    changed = pass_.run(gm, ctx)
    verify(gm, pass_.ensures, ctx, pass_.name, deep=True)
    text, notes = ir.format_graph(gm), annotations(gm)
    assert changed or (text == text_before and notes == notes_before), (
        "the pass changed the graph and says it did not"
    )
    if modified is not None:
        assert changed is modified
    assert pass_.run(gm, ctx) is False, (
        f"a second run of {pass_.name} changes something:\n{text}\n->\n{ir.format_graph(gm)}"
    )
    assert ir.format_graph(gm) == text
    assert annotations(gm) == notes
    if expected_text is not None:
        assert text == textwrap.dedent(expected_text).strip()
    if inputs is not None:
        run = reference or before
        assert run is not None
        mine, theirs = fresh(tuple(inputs)), fresh(tuple(inputs))
        same(gm(*mine), run(*theirs), tolerance=tolerance)
        same(mine, theirs)  # what the graph writes into its inputs
    return gm


def unchanged(
    pass_: Pass, gm: fx.GraphModule, ctx: Context | None = None, inputs: Sequence[Any] | None = None
) -> None:
    """A near miss: the pass leaves this graph as it is."""
    text = ir.format_graph(gm)
    check_pass(pass_, gm, ctx, modified=False, inputs=inputs)
    assert ir.format_graph(gm) == text


def prepared(gm: fx.GraphModule, ctx: Context | None = None, *, until: str) -> fx.GraphModule:
    """Run the forward passes that come before ``until``."""
    ctx = ctx or context()
    for step in FORWARD:
        if step.name == until:
            return gm
        step.run(gm, ctx)
        verify(gm, step.ensures, ctx, step.name, deep=True)
    return gm


def training_casts(run: Callable[..., Any], model: nn.Module, args: tuple[torch.Tensor, ...]) -> CastCount:
    """Casts of a second forward and backward. The gradient that comes in has the output's dtype, as from a
    loss, so that no cast of the test's own is counted."""
    tangent: list[torch.Tensor] = []

    def step() -> None:
        for tensor in (*model.parameters(), *args):
            tensor.grad = None
        out = run(*args)
        if not tangent:
            tangent.append(torch.ones_like(out))
        out.backward(tangent[0])

    step()
    return count_casts(step)


class ExportMixed:
    """A module through the export front end and the forward passes: call it as the module itself.

    ``graph`` is the rewritten graph; buffers that the model writes to are written in the module given.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        level: str = "O2",
        dtype: torch.dtype = BF16,
        *,
        policy: Policy | None = None,
        dynamic_shapes: Any = None,
    ) -> None:
        chosen = policy or Policy(level, dtype)
        captured = capture_export(model, args, kwargs, dynamic_shapes, low=chosen.low)
        self.program, self.graph = captured.program, captured.graph
        assert not captured.twin_failed
        self.ctx = Context(chosen, True, marked_modules(modules_of(model)), captured.twin)
        order.build().forward.run(self.graph, self.ctx, [], graph="forward")
        self.module = self.program.module()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def rows(self) -> list[Row]:
        return graph_rows(self.graph, 0)
