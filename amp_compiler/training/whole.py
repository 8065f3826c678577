"""A training step as one graph: model, loss, backward, loss scaling and the choice between old and new state.

Dynamo captures ``loss(model(inputs), targets)`` and guards it; the backend builds the joint graph and returns to Dynamo
a callable that runs all of it at once. The callable returns the loss; the gradients go into the window.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from .. import ir
from ..capture.autodiff import compile_joint, decompositions_for, joint_graph
from ..capture.effects import assigned_attributes, input_sources
from ..common.errors import CaptureError
from ..common.gradients import LOW
from ..common.torch_names import (
    OpOverload,
    foreach_copy_,
    is_any_autocast_enabled,
    no_autocast,
    pytree,
    set_grad_enabled,
)
from ..inspect.report import cast_totals, graph_rows, kernel_counts
from ..parallel.engine import Engine
from ..passes import order
from ..rewrite.base import Context
from ..runtime.backend import Backend
from ..runtime.options import Options, resolve_backend
from ..runtime.prepare import prepare_kernels
from ..runtime.state import Piece, State
from .owner import Owner
from .probe import Probe
from .results import check_loss
from .scaler_state import host_value
from .window import Window, rng_state

if TYPE_CHECKING:
    from ..parallel.shards import Shard

#: the sources, as Dynamo writes them, of the arguments of a step's captured function; all other inputs are the model's
_GIVEN = ("L['args']", "L['kwargs']", "L['targets']")
#: namespaces whose ops say by a tag if they draw random numbers
_KNOWN = ("aten", "prims", "amp", "_c10d_functional")


class WholeStep(Backend):
    """Turns each graph that Dynamo captures into a callable that runs forward and backward and fills the window."""

    def __init__(
        self, owner: Owner, options: Options, state: State, window: Window, probe: Probe, engine: Engine
    ) -> None:
        super().__init__(owner.model, options, state)
        self.owner, self.window, self.probe, self.engine = owner, window, probe, engine

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from ..capture.lower import why_not

        refused = why_not(gm)
        if refused is not None:
            raise CaptureError(refused)
        return self.run(self.rewrite(gm, example_inputs), example_inputs)

    def run(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        loss = graph.meta.get(ir.LOSS)
        if loss is None:
            raise CaptureError("no tensor was returned as the loss")
        check_loss(_output(graph, loss), self.owner.loss_fn)
        sources = input_sources(graph)
        own = {i for i, source in enumerate(sources) if not source.startswith(_GIVEN)}
        known = {id(tensor): name for name, tensor in self.owner.buffers().items()}
        names = [known.get(id(given), source) for given, source in zip(example_inputs, sources, strict=True)]
        forward = ir.copy_graph(graph)  # AOTAutograd changes its input: it detaches outputs
        backend = resolve_backend(self.options.backend, example_inputs)
        joint = joint_graph(forward, example_inputs, own, decompositions_for(backend))
        places = [n for n in graph.graph.nodes if n.op == "placeholder"]
        for node in joint.graph.nodes:
            if node.op == "placeholder" and node.meta[ir.ROLE].kind == "primal":
                node._rename(places[node.meta[ir.ROLE].index].name)
        joint.meta[ir.PARAMETER] = {i for i, n in enumerate(places) if n.meta.get(ir.PARAMETER)}
        trained = {id(tensor): name for name, tensor in self.owner.named_trained().items()}
        joint.meta[ir.NAMES] = {
            i: trained[id(given)] for i, given in enumerate(example_inputs) if id(given) in trained
        }
        shards = self.engine.among(example_inputs)
        joint.meta[ir.SHARDED] = {i: shard.name for i, shard in shards.items()}
        prepare_kernels(joint, self.options.policy, self.options.disable_passes)
        trained_tensors = [t for t in example_inputs if isinstance(t, Tensor) and t.requires_grad]
        widens = self.window.wide and any(t.dtype in LOW for t in trained_tensors)
        variants = [self._variant(ir.copy_graph(joint), backend, reduces, widens) for reduces in self._variants()]
        last = variants[-1]
        self.engine.captured(graph, last.joint)
        rows = graph_rows(graph, len(self.state.pieces))
        self.state.pieces.append(Piece(graph, rows, cast_totals(last.joint), kernel_counts(last.joint), last.joint))
        constants = {**dict(forward.named_parameters()), **dict(forward.named_buffers())}
        attributes = assigned_attributes()
        runs = [StepGraph(v.joint, v.weights, names, attributes, constants, self.owner, self.window, backend,
                          shards) for v in variants]  # fmt: skip
        if len(runs) > 1:
            runs[-1].share_low_copies(runs[0])

        reduced = frozenset(name for names in last.joint.meta.get(ir.BUCKETS, ()) for name in names)

        def call(*args: Any) -> Any:
            if self.probe.looking:
                return self.probe.run(graph, args)
            self.window.widened |= widens
            ends = self.window.done == self.window.size - 1
            self.window.reduced = reduced if ends else frozenset()
            return runs[-1 if ends else 0](args)

        return call

    def _variants(self) -> tuple[bool, ...]:
        """Return which joint graphs are needed, by whether they reduce gradients: that of the last micro-batch does."""
        if self.engine.reduction(of_sums=False) is None:
            return (False,)
        return (False, True) if self.window.size > 1 else (True,)

    def _variant(self, joint: fx.GraphModule, backend: str, reduces: bool, widens: bool) -> Variant:
        steps = order.build(self.options.disable_passes)
        accumulates = self.window.size > 1
        one_by_one = backend == "eager" and self.window.device.type == "cpu"
        outside = one_by_one and not accumulates and not self.engine.together
        ctx = Context(
            self.options.policy, self.options.keep_output_dtypes, backend=backend, accumulates=accumulates,
            scales_loss=self.window.scale is not None, updates_in_fp32=widens,
            recomputes=any("recompute" in n.meta for n in joint.graph.nodes), restores_outside=outside,
            reduction=self.engine.reduction(of_sums=accumulates) if reduces else None, sharding=self.engine.sharding(),
        )  # fmt: skip
        name = "joint, last micro-batch" if reduces and accumulates else "joint"
        steps.step.run(joint, ctx, self.state.history, graph=name, after="autodiff")
        if self.window.scale is None:
            _own_gradients(joint)
        weights = joint.meta.get(ir.WEIGHTS)
        if weights is not None:
            steps.weights.run(weights, ctx, self.state.history, graph="weights", after="hoist_weight_casts")
        return Variant(joint, weights)


class Variant(NamedTuple):
    """A joint graph after all passes, and the graph that makes its low copies of weights, if it has one."""

    joint: fx.GraphModule
    weights: fx.GraphModule | None


def _own_gradients(joint: fx.GraphModule) -> None:
    """Clone gradients that share memory with something else, as the next micro-batch is added to them in place. Needed
    only where no unscaling makes new tensors of them."""
    graph = joint.graph
    last = next(iter(reversed(graph.nodes)))
    results: list[Any] = list(pytree.tree_leaves(last.args[0]))
    classes = ir.alias_classes(graph)
    taken = [classes[n] for n in graph.nodes if n.op == "placeholder"]
    for place, role in enumerate(joint.meta[ir.ROLE]):
        node = results[place]
        value = ir.tensor_of(node)
        expanded = value is not None and any(stride == 0 for stride in value.stride())
        if role.kind == "gradient" and (expanded or classes[node] in taken):
            with graph.inserting_before(last):
                results[place] = ir.call(
                    graph, ir.fake_mode(graph), torch.ops.aten.clone.default, (node,),
                    {"memory_format": torch.contiguous_format},
                )  # fmt: skip
        taken.append(classes[node])
    last.args = (tuple(results),)
    joint.recompile()


def _shared(joint: fx.GraphModule, places: Sequence[int]) -> frozenset[int]:
    """Return those of the outputs that may share memory with an input or with another of them: one is written to while
    the other is still needed."""
    if not places:
        return frozenset()
    results = pytree.tree_leaves(next(iter(reversed(joint.graph.nodes))).args[0])
    classes = ir.alias_classes(joint.graph)
    taken = [classes[n] for n in joint.graph.nodes if n.op == "placeholder"]
    taken += [classes[results[place]] for place in places]
    return frozenset(place for place in places if taken.count(classes[results[place]]) > 1)


def _draws_numbers(joint: fx.GraphModule) -> bool:
    """Whether running a graph may change the state of a random generator. Of ops that are not torch's or ours, and of
    those with a body, that is not known."""
    calls = [n.target for n in joint.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    known = [target for target in calls if isinstance(target, OpOverload) and target.namespace in _KNOWN]
    return len(known) < len(calls) or any(torch.Tag.nondeterministic_seeded in target.tags for target in known)


def _output(graph: fx.GraphModule, index: int) -> Any:
    last = next(iter(reversed(graph.graph.nodes)))
    node = pytree.tree_leaves(last.args[0])[index]
    return ir.tensor_of(node) if isinstance(node, fx.Node) else node


class StepGraph:
    """Runs a joint graph: collects its inputs and distributes its outputs according to their roles."""

    def __init__(
        self,
        joint: fx.GraphModule,
        weights: fx.GraphModule | None,
        names: Sequence[str],
        attributes: Sequence[tuple[dict[str, Any], str]],
        constants: Mapping[str, Tensor],
        owner: Owner,
        window: Window,
        backend: str,
        shards: Mapping[int, Shard],
    ) -> None:
        self.shards = shards
        self.names, self.attributes, self.owner, self.window = names, attributes, owner, window
        self.inputs: list[ir.Role] = [n.meta[ir.ROLE] for n in joint.graph.nodes if n.op == "placeholder"]
        #: of each input, the argument that it is, and those that are made for each call instead
        self.places = [role.index if role.kind == "primal" else 0 for role in self.inputs]
        self.made = [(place, role) for place, role in enumerate(self.inputs) if role.kind != "primal"]
        outputs: tuple[ir.Role, ...] = joint.meta[ir.ROLE]
        self.results = [place for place, role in enumerate(outputs) if role.kind == "output"]
        self.overflow = next((place for place, role in enumerate(outputs) if role.kind == "found"), None)
        #: (place among the outputs, argument) of gradients, of those of them that include the sum so far, and of new
        #: values of arguments
        self.gradients = [(p, r.index) for p, r in enumerate(outputs) if r.kind in ("gradient", "total")]
        self.totals = [role.index for role in outputs if role.kind == "total"]
        self.mutations = [(p, role.index) for p, role in enumerate(outputs) if role.kind == "mutation"]
        self.shared = _shared(joint, [place for place, _ in self.mutations])
        self.draws = _draws_numbers(joint)
        self.sums = [role.index for role in self.inputs if role.kind == "sum"]
        self.restored = [role.index for role in joint.meta[ir.RESTORED]]
        #: the graph gives the new state of the model, also if a gradient is not finite
        self.restores = bool(self.restored) and self.overflow is not None and not any(
            role.kind == "saved" for role in self.inputs
        )
        (tangent,) = [n for n in joint.graph.nodes if n.op == "placeholder" and n.meta[ir.ROLE].kind == "tangent"]
        value = ir.tensor_of(tangent)
        assert value is not None
        self.tangent = torch.full(tuple(value.shape), 1 / window.size, dtype=value.dtype, device=value.device)
        self.constants = {r.name: constants[r.name] for r in self.inputs if r.kind == "constant"}
        low = [r.index for r in self.inputs if r.kind == "low"]
        self.low = None if weights is None else LowCopies(weights.forward, low)
        self.forward = compile_joint(joint, backend)

    def share_low_copies(self, other: StepGraph) -> None:
        """Use another variant's low copies of the weights, if both need the same ones."""
        if self.low is not None and other.low is not None and self.low.indices == other.low.indices:
            self.low = other.low

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            if not is_any_autocast_enabled():
                return self._run(args)
            with no_autocast():
                return self._run(args)
        finally:
            set_grad_enabled(enabled)

    def _run(self, args: Sequence[Any]) -> list[Any]:
        window = self.window
        if self.draws:
            window.rng = rng_state(window.device)
        window.show()
        if window.done == 0:
            window.release(self.owner.parameters())
        if self.shards:
            args = [self.shards[i].take() if i in self.shards else given for i, given in enumerate(args)]
        if self.sums:
            window.begin_sums([args[index] for index in self.sums])
        low = iter(self.low.of(args, window.number) if self.low is not None else ())
        values = [args[place] for place in self.places]
        for place, role in self.made:
            values[place] = self._value(role, args, low)
        results = self.forward(values)
        for index in self.restored if window.size > 1 else ():
            if self.names[index] not in window.saved:
                window.saved[self.names[index]] = args[index].clone()
        if self.attributes:
            window.hold(self.attributes)  # Dynamo assigns to them after this has returned
        return self._hand_on(args, results)

    def _value(self, role: ir.Role, args: Sequence[Any], low: Any) -> Any:
        kind = role.kind
        if kind == "low":
            return next(low)
        if kind == "sum":
            return args[role.index].grad
        if kind == "tangent":
            return self.tangent
        if kind == "scale":
            return self.window.scale
        if kind == "found":
            return self.window.found
        if kind == "saved":
            return self.window.saved.get(self.names[role.index], args[role.index])
        return self.constants[role.name]

    def _hand_on(self, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        for index in self.totals:
            args[index].grad = None  # it was one of the summands
        if self.overflow is not None:
            self.window.found = results[self.overflow]
        self.window.add([args[index] for _, index in self.gradients], [results[place] for place, _ in self.gradients])
        if self.mutations:
            written = [(args[index], results[place].clone() if place in self.shared else results[place])
                       for place, index in self.mutations]  # fmt: skip
            if self.restores:
                written = self._old_or_new(written)
            if written:
                foreach_copy_([tensor for tensor, _ in written], [value for _, value in written])
        for shard in self.shards.values():
            shard.give()
        return [results[place] for place in self.results]


    def _old_or_new(self, written: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return the (tensor, new value) that are to be written: in a skipped update, the model's own tensors keep the
        values that they still hold."""
        own = [index in self.restored for _, index in self.mutations]
        found = self.window.found
        assert found is not None
        if not self.window.reads_flags:
            bad = found.ne(0).view(())
            return [(old, torch.where(bad, old, new) if is_own else new)
                    for (old, new), is_own in zip(written, own, strict=True)]  # fmt: skip
        if not host_value(found):
            return written
        return [pair for pair, is_own in zip(written, own, strict=True) if not is_own]


class LowCopies:
    """The low-precision copies of the weights, made once per update, and again if a weight has changed since."""

    def __init__(self, make: Callable[..., Any], indices: Sequence[int]) -> None:
        self.make, self.indices = make, indices
        self.made_for: tuple[Any, ...] = ()
        self.copies: Sequence[Tensor] = ()

    def of(self, args: Sequence[Any], number: int) -> Sequence[Tensor]:
        sources = [args[index] for index in self.indices]
        now = (number, [(s._version, s.data_ptr()) for s in sources])
        if now != self.made_for:
            self.copies = ()  # free the old ones before making new ones
            self.copies = self.make(*sources)
            self.made_for = now
        return self.copies
