"""Dynamo's graph of torch functions → pre-dispatch ATen, with module path and source line on every node.

torch 2.13 internals used here, and why:

- ``process_inputs`` / ``construct_fake_mode`` (torch._functorch): the fakes that AOTAutograd itself will use,
  with Dynamo's symbolic shapes; making our own would create a second set of symbols.
- ``make_fx(..., pre_dispatch=True)`` under ``fx.traceback.preserve_node_meta``: the only tracer that keeps
  composite ops (``aten.linear``) whole and passes on where each node came from.
- ``reenter_make_fx`` and ``track_tensor_tree``: to keep a higher-order op as one node with lowered bodies.
  ``make_fx`` would inline a custom ``autograd.Function`` and lose its gradient without a word.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from .. import ir
from ..common.errors import CaptureError
from ..policy import Policy
from ..policy.ops.row import OpClass
from . import recurrent, vmap
from .twin import promoting
from .vmap import is_functorch, is_vmap

Decompositions = dict[Any, Callable[..., Any]]


def lower(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    policy: Policy,
    modules: Mapping[int, str],
    *,
    fakes: Sequence[Any] | None = None,
    promote: bool = False,
) -> fx.GraphModule:
    """Lower one graph from Dynamo. ``modules`` maps ``id(module)`` to its path in the user's model.

    ``fakes``: values for the graph's inputs other than those of ``example_inputs``. ``promote``: where torch refuses
    operands of two float dtypes, take the wider (for the twin, see ``twin.py``).
    """
    if fakes is None:
        fakes, mode = fakify(example_inputs)
    else:
        modes = (getattr(v, "fake_mode", None) for v in fakes)
        mode = next((m for m in modes if m is not None), None) or torch._guards.detect_fake_mode(list(fakes))
    loss = _take_out_loss(gm)
    gm = vmap.without_vmap(gm)
    interpreter = _PromotingInterpreter(gm, garbage_collect_values=False) if promote else _LoweringInterpreter(gm)
    with _tracing(mode):
        lowered = make_fx(interpreter.run, decomposition_table=decompositions(policy), pre_dispatch=True)(
            *fakes
        )
    assert isinstance(lowered, fx.GraphModule)
    lowered.graph.eliminate_dead_code()
    _refuse_leaks(lowered)
    _name_inputs(gm, lowered)
    _mark_parameters(lowered, example_inputs)
    for _, inner in ir.all_graphs(lowered):
        annotate_origin(inner, modules)
        for node in inner.graph.nodes:
            for key in (ir.DTYPE_OF, ir.NUMBER_OF):
                if isinstance(of := node.meta.get(key), fx.Node):
                    node.meta[key] = of.name  # names are final only now
    lowered.meta.update(gm.meta)
    lowered.meta[ir.LOSS] = loss
    lowered.meta[ir.OUTPUT_DTYPES] = _output_dtypes(gm)
    lowered.recompile()
    return lowered


def _take_out_loss(gm: fx.GraphModule) -> int | None:
    """``amp::loss`` says which output is the loss of a training step: drop the node and give back the place."""
    last = next(iter(reversed(gm.graph.nodes)))
    place = None
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in (torch.ops.amp.loss, torch.ops.amp.loss.default):
            place = pytree.tree_leaves(last.args[0]).index(node)
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            gm.recompile()
    return place


def _output_dtypes(gm: fx.GraphModule) -> list[torch.dtype | None]:
    """What the model's outputs are: Dynamo ran nested autocast regions, while lowering makes nodes of them."""
    last = next(iter(reversed(gm.graph.nodes)))
    values = [n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in pytree.tree_leaves(last.args[0])]
    return [v.dtype if isinstance(v, torch.Tensor) else None for v in values]


#: higher-order ops that the passes know; the body of any other must not be run on fakes
KNOWN_HIGHER_ORDER = frozenset({
    "autograd_function_apply", "tag_activation_checkpoint", "cond", "while_loop", "scan", "map", "associative_scan",
    "wrap", "wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph",
})  # fmt: skip


def why_not(gm: fx.GraphModule) -> str | None:
    """Why a graph from Dynamo must not be lowered, or None.

    Tracing runs the graph on fakes. A tensor that the graph holds itself (optimizer state) is real and would be
    written to; levels of torch.func exist only at run time, and a fake would leak out of them.
    """
    for node in gm.graph.nodes:
        held = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, torch.Tensor):
            return "it holds tensors of its own, such as an optimizer's state"
        if is_functorch(node) and not is_vmap(node):
            return f"it uses torch.func ({getattr(node.target, '__name__', node.target)})"
        if ir.is_higher_order(node):
            bodies = [inner for _, inner in ir.subgraphs(gm, node)]
            if not is_closed(node.target, bodies):
                refused = next((why for inner in bodies if (why := why_not(inner)) is not None), None)
                if refused is not None:
                    return refused
    return None


def is_closed(target: Any, bodies: Sequence[Any]) -> bool:
    """Whether a higher-order op must stay as it is: an unknown one, or one whose body uses torch.func (the scan of
    a state-space model), which cannot run on the tracer's fakes."""
    if target.name() not in KNOWN_HIGHER_ORDER:
        return True
    ours = target.name() in ("autograd_function_apply", "tag_activation_checkpoint")  # bodies that are lowered here
    found = [inner for body in bodies if isinstance(body, fx.GraphModule) for _, inner in ir.all_graphs(body)]
    nodes = [node for inner in found for node in inner.graph.nodes]
    return any(is_functorch(node) and not (ours and is_vmap(node)) for node in nodes)


def fakify(example_inputs: Sequence[Any]) -> tuple[list[Any], Any]:
    """The inputs as AOTAutograd's fakes, and their fake mode."""
    from torch._functorch._aot_autograd.frontend_utils import construct_fake_mode, process_inputs
    from torch._functorch._aot_autograd.schemas import AOTConfig

    config = AOTConfig(
        fw_compiler=None, bw_compiler=None, partition_fn=None, decompositions={}, num_params_buffers=0, aot_id=0,
        keep_inference_input_mutations=False,
    )  # fmt: skip
    flat = list(example_inputs)
    mode, shape_env = construct_fake_mode(flat, config)
    fakes, _ = process_inputs(flat, config, mode, shape_env)
    return list(fakes), mode


def _refuse_leaks(gm: fx.GraphModule) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    for _, inner in ir.all_graphs(gm):
        for node in inner.graph.nodes:
            if node.op == "get_attr" and isinstance(getattr(inner, str(node.target), None), FakeTensor):
                raise CaptureError(f"a value of the trace became a constant of the graph ({node.target})")


@contextlib.contextmanager
def _tracing(mode: Any) -> Iterator[None]:
    with mode, torch.fx.traceback.preserve_node_meta():
        yield


# ------------------------------------------------------------------------------------------ decompositions

def decompositions(policy: Policy) -> Decompositions:
    """What to take apart while lowering: RNNs always (torch's fused CPU op has no usable backward under
    AOTAutograd); under ``Policy.torch`` every composite op that autocast does not list, because autocast
    sees the ops inside it."""
    table: Decompositions = {} if policy.autocast_device is None else _composites(policy)
    table.update(recurrent.decompositions(policy))
    return table


#: composites that a trace cannot take apart: the C++ body of the first asks for a dtype and would be fp32 for
#: ever, that of the second stops gradients, which no node would show
KEEP_WHOLE = ("rms_norm", "cosine_similarity")
#: composites that only move values, and do it with an op that autocast lists (reflection_pad2d)
HOLDS_LISTED = ("pad",)


def _composites(policy: Policy) -> Decompositions:
    from ..policy.ops.names import find_row
    from ..policy.ops.torch_lists import LISTS

    assert policy.autocast_device is not None
    listed = frozenset().union(*LISTS[policy.autocast_device].values())
    table: Decompositions = {}
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        if not qualified.startswith("aten::"):
            continue
        name = qualified.removeprefix("aten::")
        row = find_row(name.split(".")[0])
        op = _overload(name)
        if name in listed or row is None or row.cls is OpClass.KEEP or row.name in KEEP_WHOLE or op is None:
            continue
        if row.cls is OpClass.EXACT and row.name not in HOLDS_LISTED:
            continue  # what only moves values holds nothing that autocast would cast
        table[op] = op.decompose
    return table


def _overload(name: str) -> torch._ops.OpOverload | None:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) else None


# ------------------------------------------------------------------------------------- higher-order nodes


class _LoweringInterpreter(fx.Interpreter):
    """Runs Dynamo's graph under the tracer; custom autograd functions and checkpoints stay nodes.

    An op that has nothing to do (``x.float()`` in fp32, dropout in eval mode) gives back its input itself, and the
    tracer would then take every later use of the input for a use of that op. Give back a tensor of its own.
    """

    def run_node(self, n: fx.Node) -> Any:
        inputs = [self.env[a] for a in n.all_input_nodes if isinstance(self.env.get(a), torch.Tensor)]
        mode = get_proxy_mode()
        if n.op not in ("call_function", "call_method") or mode is None:
            return super().run_node(n)
        before = [(x, get_proxy_slot(x, mode.tracer, None)) for x in inputs]
        result = super().run_node(n)
        named = {key: n.meta[key] for key in (ir.DTYPE_OF, ir.NUMBER_OF) if key in n.meta}
        if n.op == "call_method" and n.target == "to" and len(n.args) > 1 and isinstance(n.args[1], fx.Node):
            named[ir.DTYPE_OF] = n.args[1].name  # ``x.to(y)``, of which only y's dtype is left below
        for key, of in named.items():
            asked = next((v for k, v in self.env.items() if k.name == of), None)
            if isinstance(asked, torch.Tensor) and isinstance(result, torch.Tensor):
                made, source = (get_proxy_slot(v, mode.tracer, None) for v in (result, asked))
                if made is not None and source is not None:
                    made.proxy.node.meta[key] = source.proxy.node
        for x, proxy in before:
            if result is x and proxy is not None:
                return _apart(x, proxy, mode.tracer)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body = self.fetch_attr(str(target))
        assert isinstance(body, fx.GraphModule)
        here = torch.fx.traceback.get_current_meta()
        meta: dict[str, Any] = {k: v for k, v in here.items() if k in ("stack_trace", "nn_module_stack")}
        return vmap.run(body, args, meta, type(self))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.HigherOrderOperator):
            if target.name() == "autograd_function_apply":
                return _keep_autograd_function(target, args, kwargs, type(self))
            if target.name() == "tag_activation_checkpoint":
                return _keep_checkpoint(target, args, kwargs, type(self))
            if is_closed(target, args):
                return _keep_closed(target, args, kwargs)
        if target is getattr(torch._C._autograd, "_get_data_attr", None):
            return args[0].detach()  # the tracer does not see ``x.data``; both share memory and stop gradients
        return super().call_function(target, args, kwargs)


class _PromotingInterpreter(_LoweringInterpreter):
    """For the twin: a promoted operand keeps its proxy, so that no cast shows which the author did not write."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        in_place = "setitem" in str(target) or getattr(target, "__name__", "").endswith("_")
        return promoting(lambda a, k: super(_PromotingInterpreter, self).call_function(target, a, k),
                         args, kwargs, in_place, converted)  # fmt: skip

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return promoting(lambda a, k: super(_PromotingInterpreter, self).call_method(target, a, k),
                         args, kwargs, str(target).endswith("_"), converted)  # fmt: skip


def converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``value`` in another dtype, for the tracer still the same value."""
    mode = get_proxy_mode()
    if mode is None:
        return value.to(dtype)
    proxy = get_proxy_slot(value, mode.tracer, None)
    with disable_proxy_modes_tracing():
        new = value.to(dtype)
    if proxy is not None:
        set_proxy_slot(new, mode.tracer, proxy)
    return new


def _apart(value: torch.Tensor, proxy: Any, tracer: Any) -> torch.Tensor:
    """``value`` keeps the proxy that it had; the op that returned it gets a twin (unless it wrote in place)."""
    newest = get_proxy_slot(value, tracer)
    target = getattr(newest.proxy.node, "target", None)
    in_place = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    if newest is proxy or in_place:
        return value
    with disable_proxy_modes_tracing():
        twin = value.view_as(value)
    set_proxy_slot(twin, tracer, newest)
    set_proxy_slot(value, tracer, proxy)
    return twin


def _keep_autograd_function(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], interpreter: Any) -> Any:
    forward, backward, *given = args
    lowered_forward = _lower_body(forward, given, interpreter)
    output, saved = _outputs(lowered_forward)
    grads = pytree.tree_leaves(output)
    lowered_backward = _lower_body(backward, [_fresh(v) for v in (*grads, *pytree.tree_leaves(saved))], interpreter)
    frozen = set(kwargs.get("non_differentiable_idx", ()))
    needs = any(isinstance(a, torch.Tensor) and a.requires_grad for a in given)
    results = []
    for index, value in enumerate(pytree.tree_leaves(output)):
        fresh = _fresh(value)
        if needs and isinstance(fresh, torch.Tensor) and fresh.is_floating_point() and index not in frozen:
            fresh.requires_grad_()
        results.append(fresh)
    flat = pytree.tree_unflatten(results, pytree.tree_structure(output))
    return _emit(target, [lowered_forward, lowered_backward], given, kwargs, flat)


def _keep_checkpoint(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], interpreter: Any) -> Any:
    body, *given = args
    lowered = _lower_body(body, given, interpreter)
    if "_checkpoint_context_fn" in body.meta:
        lowered.meta["_checkpoint_context_fn"] = body.meta["_checkpoint_context_fn"]
    values = _outputs(lowered)
    needs = any(isinstance(a, torch.Tensor) and a.requires_grad for a in given)
    fresh = pytree.tree_map_only(torch.Tensor, lambda v: _fresh(v, needs), values)
    return _emit(target, [lowered], given, kwargs, fresh)


def _keep_closed(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A node with its bodies as Dynamo wrote them; passes see the node and do not look inside."""
    with disable_proxy_modes_tracing():
        fresh = pytree.tree_map_only(torch.Tensor, lambda t: _fresh(t, t.requires_grad), (args, kwargs))
        values = pytree.tree_map_only(torch.Tensor, lambda t: _fresh(t, t.requires_grad), target(*fresh[0], **fresh[1]))
    for body in pytree.tree_leaves((args, kwargs), is_leaf=lambda v: isinstance(v, fx.GraphModule)):
        if isinstance(body, fx.GraphModule):
            body.meta[ir.CLOSED] = True
    mode = get_proxy_mode()
    assert mode is not None
    tracer: Any = mode.tracer

    def place(value: Any) -> Any:
        if isinstance(value, fx.GraphModule):
            name = tracer.get_fresh_qualname(f"{target.name()}_body")
            tracer.root.register_module(name, value)
            return tracer.create_proxy("get_attr", name, (), {})
        return tracer.unwrap_proxy(value) if isinstance(value, (torch.Tensor, torch.SymInt)) else value

    proxies = pytree.tree_map(place, (args, kwargs), is_leaf=lambda v: isinstance(v, fx.GraphModule))
    out = tracer.create_proxy("call_function", target, *proxies)
    return track_tensor_tree(values, out, constant=None, tracer=tracer)


def _lower_body(body: fx.GraphModule, given: Sequence[Any], interpreter: type[_LoweringInterpreter]) -> fx.GraphModule:
    from torch._higher_order_ops.utils import reenter_make_fx

    with torch.fx.traceback.preserve_node_meta():
        plain = vmap.without_vmap(body)
        lowered = reenter_make_fx(interpreter(plain, garbage_collect_values=False).run)(*given)
    assert isinstance(lowered, fx.GraphModule)
    return lowered


def _outputs(gm: fx.GraphModule) -> Any:
    result = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    return pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], result)


def _fresh(value: Any, requires_grad: bool = False) -> Any:
    """A new fake like ``value``, unknown to any tracer."""
    if not isinstance(value, torch.Tensor):
        return value
    with disable_proxy_modes_tracing():
        fresh = ir.retype(value, value.dtype)
    return fresh.requires_grad_() if requires_grad and value.is_floating_point() else fresh


def _emit(target: Any, bodies: list[fx.GraphModule], given: Sequence[Any], kwargs: Any, values: Any) -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    tracer: Any = mode.tracer
    held = []
    for body in bodies:
        name = tracer.get_fresh_qualname(f"{target.name()}_body")
        tracer.root.register_module(name, body)
        held.append(tracer.create_proxy("get_attr", name, (), {}))
    proxies = pytree.tree_map(tracer.unwrap_proxy, tuple(given))
    out = tracer.create_proxy("call_function", target, (*held, *proxies), dict(kwargs))
    return track_tensor_tree(values, out, constant=None, tracer=tracer)


# ------------------------------------------------------------------------------------------------- origin


#: the class of a compiled function inside of the model: a module to torch, but none of the model's
COMPILED_FUNCTION = "AmpFunction"


def _class_name(cls: Any) -> str:
    """The plain name of a class that a tracer names itself, or by a text."""
    return str(getattr(cls, "__qualname__", cls)).rpartition(".")[2]


def annotate_origin(gm: fx.GraphModule, modules: Mapping[int, str]) -> None:
    """Write each node's module stack with paths as ``named_modules`` has them."""
    cache: dict[int, list[tuple[str, Any]]] = {}
    for node in gm.graph.nodes:
        raw = node.meta.get("nn_module_stack")
        if not raw:
            continue
        if id(raw) not in cache:
            kept = [(key, name, cls) for key, (name, cls) in raw.items() if _class_name(cls) != COMPILED_FUNCTION]
            cache[id(raw)] = [(_path(key, name, modules), cls) for key, name, cls in kept]
        node.meta["amp_module_stack"] = cache[id(raw)]


_INDEX = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")
_ROOT = re.compile(r"^(L|G)\[['\"][^'\"]+['\"]\]\.?|^L__self__\.?|^L\.")


def _path(key: Any, name: str, modules: Mapping[int, str]) -> str:
    digits = str(key).split("@")[0]
    if digits.isdigit() and int(digits) in modules:
        return modules[int(digits)]
    clean = _ROOT.sub("", name)
    clean = re.sub(r"\._(modules|parameters|buffers)(?=\[|\.)", "", clean)
    clean = re.sub(r"^_(modules|parameters|buffers)(?=\[|\.)", "", clean)
    return _INDEX.sub(r".\1", clean).lstrip(".")


def _mark_parameters(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Traced values are detached, so what is a leaf that needs a gradient has to be written down."""
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, value in zip(places, example_inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
            node.meta[ir.PARAMETER] = True
        elif "_buffers[" in _source_text(node) and holds_large_values(value):
            node.meta[ir.CONSTANT] = value  # a mask that was registered: no dtype of ours could hold it


def holds_large_values(value: Any) -> bool:
    """Whether a buffer holds finite values that fp16 cannot, as a mask of -1e9 does."""
    plain = type(value) is torch.Tensor and value.dtype is torch.float32 and value.layout is torch.strided
    if not plain or not 0 < value.numel() <= 1 << 20:
        return False
    finite = value.detach()[value.isfinite()].abs()
    return bool(finite.numel()) and float(finite.max()) > torch.finfo(torch.float16).max


def _name_inputs(source: fx.GraphModule, lowered: fx.GraphModule) -> None:
    """Give placeholders the names that the user knows: ``encoder_0_weight`` instead of ``arg3_1``."""
    olds = [n for n in source.graph.nodes if n.op == "placeholder"]
    news = [n for n in lowered.graph.nodes if n.op == "placeholder"]
    for old, new in zip(olds, news, strict=True):
        origin = getattr(old, "_dynamo_source", None)
        if origin is not None:
            new._dynamo_source = origin
        for key in ("tensor_dict", "grapharg"):
            if key in old.meta:
                new.meta[key] = old.meta[key]
        new._rename(_input_name(_source_text(old)) or str(old.target))


def _source_text(node: fx.Node) -> str:
    """Where an input of the graph comes from, as Dynamo writes it: ``L['self']._parameters['weight']``."""
    origin = getattr(node, "_dynamo_source", None)
    text = origin.name if origin is not None else str(node.target)
    return text() if callable(text) else str(text)


def _input_name(source: str) -> str:
    """``x`` for ``L['x']``, ``args_0`` for ``L['args'][0]``, ``encoder_0_weight`` for a parameter's source."""
    if re.search(r"_(parameters|buffers)\[", source):
        path = _path("", source, {})
        name = re.sub(r"\W+", "_", path).strip("_")
        return f"model_{name}" if name[:1].isdigit() else name
    name = re.sub(r"\W+", "_", re.sub(r"^[LG](?=\[)", "", source)).strip("_")
    return name
