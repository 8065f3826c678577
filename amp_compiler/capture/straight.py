"""Run a graph of ATen ops as straight-line Python, with the least that lies between one op and the next.

``straight_line`` generates a function from a graph, as ``torch.fx`` does, but for running only. It takes the inputs as
a list and empties it, so that each is freed after its last use. Every op is bound beforehand instead of looked up by
its path. ``detach`` is another name of its input, because no gradients are recorded here, unless the graph returns it.
Where torch has a binding of its own for an op (``torch.addmm``, ``Tensor.bfloat16``), the binding is called:
it parses its arguments in about half the time that ``torch.ops`` takes, and calls the same kernel.

An elementwise op writes its result over an operand that nothing reads afterwards, if the graph made that operand: new
memory costs more than the arithmetic, and a value in the cache is not evicted for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from .. import ir
from ..kernels import lowering, unscale

aten = torch.ops.aten
_nn = torch._C._nn
#: op -> torch's own binding, which takes the same arguments and calls the same op
BINDINGS: dict[OpOverload, Callable[..., Any]] = {
    aten.mm.default: torch.mm, aten.bmm.default: torch.bmm, aten.addmm.default: torch.addmm,
    aten.baddbmm.default: torch.baddbmm, aten.convolution.default: torch.convolution,
    aten.t.default: torch.t, aten.transpose.int: torch.transpose, aten.permute.default: torch.permute,
    aten.view.default: Tensor.view, aten.expand.default: Tensor.expand, aten.unsqueeze.default: torch.unsqueeze,
    aten.squeeze.dim: torch.squeeze, aten.select.int: torch.select, aten.cat.default: torch.cat,
    aten.clone.default: torch.clone, aten.detach.default: torch.detach,
    aten.add.Tensor: torch.add, aten.sub.Tensor: torch.sub, aten.mul.Tensor: torch.mul, aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg, aten.reciprocal.default: torch.reciprocal, aten.exp.default: torch.exp,
    aten.log.default: torch.log, aten.sqrt.default: torch.sqrt, aten.rsqrt.default: torch.rsqrt,
    aten.pow.Tensor_Scalar: torch.pow, aten.tanh.default: torch.tanh, aten.sigmoid.default: torch.sigmoid,
    aten.erf.default: torch.erf, aten.relu.default: torch.relu, aten.gelu.default: _nn.gelu,
    aten.silu.default: _nn.silu, aten.where.self: torch.where,
    aten.sum.dim_IntList: torch.sum, aten.mean.dim: torch.mean,
    aten.native_layer_norm.default: torch.native_layer_norm, aten.embedding.default: torch.embedding,
    aten._softmax.default: torch._softmax, aten._log_softmax.default: torch._log_softmax,
    aten._softmax_backward_data.default: torch._softmax_backward_data,
    aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
    torch.ops.amp.unscale_.default: unscale.in_place,
}  # fmt: skip
#: elementwise op -> the binding that writes its result over the first operand
IN_PLACE: dict[OpOverload, Callable[..., Any]] = {
    aten.add.Tensor: Tensor.add_, aten.sub.Tensor: Tensor.sub_, aten.mul.Tensor: Tensor.mul_,
    aten.div.Tensor: Tensor.div_, aten.neg.default: Tensor.neg_, aten.reciprocal.default: Tensor.reciprocal_,
    aten.exp.default: Tensor.exp_, aten.log.default: Tensor.log_, aten.sqrt.default: Tensor.sqrt_,
    aten.rsqrt.default: Tensor.rsqrt_, aten.tanh.default: Tensor.tanh_, aten.sigmoid.default: Tensor.sigmoid_,
    aten.relu.default: Tensor.relu_, aten.silu.default: _nn.silu_,
}  # fmt: skip
#: of these, either operand may be the one that is written over: the results have the same bits
_COMMUTE = frozenset({aten.add.Tensor, aten.mul.Tensor})
_CASTS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float, torch.bfloat16: Tensor.bfloat16, torch.float16: Tensor.half,
}  # fmt: skip


def straight_line(gm: fx.GraphModule) -> Callable[[list[Any]], Any] | None:
    """Return a function that runs the graph on a list of its inputs, which it empties; None if the graph is not only
    made of functions."""
    nodes = list(gm.graph.nodes)
    if any(node.op in ("call_module", "call_method") for node in nodes):
        return None
    writer = _Writer(gm, _written_over(gm.graph))
    same = _detached(nodes)
    names = {node: f"v{number}" for number, node in enumerate(nodes)}
    names.update((node, names[source]) for node, source in same.items())
    # who reads a value last
    last = {same.get(source, source): node for node in nodes if node not in same for source in node.all_input_nodes}
    dying: dict[fx.Node, list[str]] = {}
    for source, node in last.items():
        dying.setdefault(node, []).append(names[source])
    taken = [names[node] for node in nodes if node.op == "placeholder"]
    lines = [f"({', '.join(taken)}{',' * bool(taken)}) = inputs", "inputs.clear()"]
    unread = [names[node] for node in nodes if node.op == "placeholder" and node not in last]
    if unread:
        lines.append(f"del {', '.join(unread)}")
    for node in nodes:
        if node.op == "output":
            lines.append(f"return {writer.value(node.args[0], names)}")
        elif node.op != "placeholder" and node not in same:
            lines.append(f"{names[node]} = {writer.call(node, names)}")
            gone = dying.get(node, []) + [names[node]] * (node not in last)
            if gone:
                lines.append(f"del {', '.join(gone)}")
    source = "def run(inputs):\n    " + "\n    ".join(lines)
    exec(compile(source, "<amp_compiler graph>", "exec"), writer.scope)
    run: Callable[[list[Any]], Any] = writer.scope["run"]
    return run


def _detached(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the nodes that detach a value and are not returned, each with the node that makes the value."""
    returned = {source for node in nodes if node.op == "output" for source in node.all_input_nodes}
    same: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.target is aten.detach.default and node not in returned:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            same[node] = same.get(source, source)
    return same


def _written_over(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the elementwise ops that may write their result over an operand, each with that operand: the graph
    allocated it, it has the result's dtype and layout, and nothing that may share its memory is read afterwards or
    returned."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    if not any(node.target in IN_PLACE for node in order):
        return {}
    classes = ir.alias_classes(graph)
    merged: dict[int, int] = {}
    for node in order:  # a view that does not say so; its class has no other root
        if node.target is aten._unsafe_view.default:
            source = classes[node.all_input_nodes[0]]
            merged[classes[node]] = merged.get(source, source)
    classes = {node: merged.get(number, number) for node, number in classes.items()}
    last_read: dict[int, int] = {}
    foreign: set[int] = set()  # memory that the graph did not allocate, or that it returns
    for node, place in order.items():
        knows = ir.is_getitem(node) or node.target in _KNOWN or node.target is aten._unsafe_view.default
        if not knows:
            foreign.add(classes[node])
        for source in node.all_input_nodes:
            last_read[classes[source]] = place
            if not knows:
                foreign.add(classes[source])
    found: dict[fx.Node, fx.Node] = {}
    for node, place in order.items():
        if node.target not in IN_PLACE:
            continue
        for number, operand in enumerate(node.args[:2] if node.target in _COMMUTE else node.args[:1]):
            if not isinstance(operand, fx.Node) or (number and (node.kwargs or len(node.args) != 2)):
                continue
            memory = classes[operand]
            if memory in foreign or last_read[memory] != place or not _alike(operand, node):
                continue
            if all(source is operand or classes[source] != memory for source in node.all_input_nodes):
                found[node] = operand
                foreign.add(memory)  # the result has another number, but the same memory
                break
    return found


#: ops whose results share memory with nothing, and whose schemas can be trusted to say which are views; what any other
#: op makes or reads is left alone
_KNOWN = frozenset({
    *BINDINGS, *IN_PLACE, torch.ops.amp.cast_matmul.default, *(row.kernel for row in lowering.ALL),
    aten._to_copy.default,
    aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.stack.default,
    aten._native_batch_norm_legit_no_training.default, aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm_backward.default, aten.native_layer_norm_backward.default, aten.convolution_backward.default,
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d.default,
    aten.mse_loss.default, aten.mse_loss_backward.default, aten.nll_loss_forward.default,
    aten.nll_loss_backward.default, aten.gelu_backward.default, aten.silu_backward.default,
    aten.tanh_backward.default, aten.sigmoid_backward.default, aten.threshold_backward.default,
    aten.embedding_dense_backward.default, aten.slice_backward.default, aten.select_backward.default,
})  # fmt: skip


def _alike(operand: fx.Node, result: fx.Node) -> bool:
    """True if two values have one dtype, device and layout. That of an elementwise op's result is dense."""
    one, two = ir.tensor_of(operand), ir.tensor_of(result)
    if one is None or two is None or one.dtype is not two.dtype or one.device != two.device:
        return False
    plain = one.layout is two.layout is torch.strided and type(one) is type(two)
    sizes = (*one.shape, *one.stride(), *two.shape, *two.stride())
    if not plain or any(type(size) is not int for size in sizes):
        return False
    return one.shape == two.shape and one.stride() == two.stride()


class _Writer:
    """Writes expressions; what has no literal is bound to a name in ``scope``."""

    def __init__(self, gm: fx.GraphModule, written_over: dict[fx.Node, fx.Node]) -> None:
        self.gm = gm
        self.written_over = written_over
        self.scope: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def bind(self, value: Any) -> str:
        name = self._known.setdefault(id(value), f"c{len(self._known)}")
        self.scope[name] = value
        return name

    def value(self, given: Any, names: dict[fx.Node, str]) -> str:
        if isinstance(given, fx.Node):
            return names[given]
        if given is None or type(given) in (int, bool, str) or (type(given) is float and math.isfinite(given)):
            return repr(given)
        if isinstance(given, tuple):
            return f"({''.join(self.value(item, names) + ', ' for item in given)})"
        if isinstance(given, list):
            return f"[{', '.join(self.value(item, names) for item in given)}]"
        if isinstance(given, dict):
            return "{" + ", ".join(f"{self.bind(k)}: {self.value(v, names)}" for k, v in given.items()) + "}"
        if isinstance(given, slice):
            parts = (given.start, given.stop, given.step)
            return f"{self.bind(slice)}({', '.join(self.value(part, names) for part in parts)})"
        return self.bind(given)

    def call(self, node: fx.Node, names: dict[fx.Node, str]) -> str:
        if node.op == "get_attr":
            return self.bind(operator.attrgetter(str(node.target))(self.gm))
        if node.target is operator.getitem:
            return f"{self.value(node.args[0], names)}[{self.value(node.args[1], names)}]"
        function, args, kwargs = _bound(node)
        if (operand := self.written_over.get(node)) is not None:
            function = IN_PLACE[node.target]  # type: ignore[index]
            args = args if args[0] is operand else (operand, args[0])
        given = [self.value(arg, names) for arg in args]
        given += [f"{key}={self.value(value, names)}" for key, value in kwargs.items()]
        return f"{self.bind(function)}({', '.join(given)})"


def _bound(node: fx.Node) -> tuple[Any, Any, dict[str, Any]]:
    """Return the function, and the arguments, by which a node is run."""
    target: Any = node.target
    if type(target) is not OpOverload:
        return target, node.args, node.kwargs
    if target is aten._to_copy.default and (cast := _cast(node)) is not None:
        return cast, node.args, {}
    return BINDINGS.get(target, target._op), node.args, node.kwargs


def _cast(node: fx.Node) -> Callable[[Tensor], Tensor] | None:
    """Return the method that does the same as a ``_to_copy`` that changes nothing but the dtype."""
    given = dict(node.kwargs)
    source = ir.tensor_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    dtype: Any = given.pop("dtype", None)
    if source is None or source.dtype is dtype or source.layout is not torch.strided:
        return None
    if given.pop("layout", torch.strided) is not torch.strided or given.pop("device", source.device) != source.device:
        return None
    return None if given else _CASTS.get(dtype)
