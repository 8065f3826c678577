"""The rule for higher-order ops: the nodes of their bodies are decided too, with what is known about their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.torch_names import pytree
from amp_compiler.ir import Decision, Mode, decisions
from amp_compiler.ir.wide import why_wide, wide_outputs
from amp_compiler.policy import Rule

from .state import At, State

#: higher-order ops whose body simply runs in place: the position of the body among the arguments
TRANSPARENT = {"tag_activation_checkpoint": 0, "wrap_with_set_grad_enabled": 1}
AUTOGRAD_FUNCTION = "autograd_function_apply"
#: higher-order ops that pass results of their body to it again: the position of these values among the arguments
LOOPS = {"while_loop": 2, "scan": 1}


def higher_order(at: At) -> Decision | None:
    """Decide the graphs inside a node, one by one. The node keeps its own dtypes, unless its body simply runs."""
    if not ir.is_higher_order(at.node):
        return None
    name, node, state = at.name.removeprefix("higher_order::"), at.node, at.state
    bodies = [inner for _, inner in ir.subgraphs(state.gm, node)]
    if name in TRANSPARENT and bodies:
        given = node.args[TRANSPARENT[name] + 1 :]
        state.enter(_inside(at, bodies[0], native=state.native), [_flow(a) for a in given])
        reason = f"{name}: the ops of its body have their own precisions"
        out, wide = _body_outputs(bodies[0]), wide_outputs(bodies[0])
        return Decision(Mode.NATIVE, None, reason, Rule.TRANSPARENT, out=out, wide=wide)
    if name == AUTOGRAD_FUNCTION:
        return _autograd_function(at, bodies)
    for body in bodies:
        state.enter(_inside(at, body, native=state.native), None)
    if name in LOOPS and bodies:
        _again(at, bodies[-1], len(pytree.tree_leaves(node.args[LOOPS[name]])))
    reason = f"{name}: its inputs and outputs keep their dtypes, the ops of its body have their own precisions"
    new = decisions.as_traced(node, reason, Rule.SEALED)
    return replace(new, wide=_together([wide_outputs(body) for body in bodies], len(new.out)))


def _autograd_function(at: At, bodies: list[fx.GraphModule]) -> Decision:
    """A custom autograd function keeps its dtypes; under ``Policy.torch`` its forward runs as under autocast."""
    node, state = at.node, at.state
    if len(bodies) == 2 and state.like_autocast and not state.native:
        forward, backward = bodies
        state.enter(State(forward, state.ctx, state.enter), [_flow(a) for a in node.args[2:]])
        output, saved = _output_values(forward)
        out = tuple(_flow(v) for v in pytree.tree_leaves(output))
        given_back = [*out, *(_flow(v) for v in pytree.tree_leaves(saved))]
        state.enter(State(backward, state.ctx, state.enter, native=True), given_back)
        reason = "a custom autograd function: its forward as autocast would run it"
        return Decision(Mode.NATIVE, None, reason, Rule.TRANSPARENT, out=out)
    for number, body in enumerate(bodies):
        first = number == 0
        state.enter(_inside(at, body, native=True) if first else State(body, state.ctx, state.enter, native=True), None)
    reason = "a custom autograd function: forward and backward keep their dtypes"
    new = decisions.as_traced(node, reason, Rule.OPAQUE)
    return replace(new, wide=_together([wide_outputs(bodies[0])] if bodies else [], len(new.out)))


def _again(at: At, body: fx.GraphModule, carried: int) -> None:
    """Decide the body of a loop again if its first results, which are its first inputs in the next round, are wide."""
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    wide: dict[fx.Node, str] = {}
    while True:
        found = zip(places[:carried], wide_outputs(body)[:carried], strict=False)
        new = {place: why for place, why in found if why and not why_wide(place)}
        if not new:
            return
        wide |= new
        at.state.enter(_inside(at, body, native=at.state.native, wide=wide), None)


def _inside(at: At, body: fx.GraphModule, *, native: bool, wide: Mapping[fx.Node, str] | None = None) -> State:
    """Return the state of a graph inside a node, including which of its inputs carry constants and which are wide."""
    pairs, carried = list(ir.operands(at.node, body)), at.state.carried.held
    held = {place: carried[given] for place, given in pairs if given in carried}
    given_wide = {place: why for place, given in pairs if (why := why_wide(given))}
    return State(body, at.state.ctx, at.state.enter, native=native, carried=held, wide={**given_wide, **(wide or {})})


def _together(wide: Sequence[tuple[str, ...]], number: int) -> tuple[str, ...]:
    """Return, for each result of a higher-order op, why it is wide: one of its bodies makes it so. ``wide``: the
    same for each body's results."""
    alike = [given[:number] for given in wide if len(given) >= number]
    found = tuple(next(filter(None, whys), "") for whys in zip(*alike, strict=True))
    return found if any(found) else ()


def _flow(value: Any) -> torch.dtype | None:
    return ir.dtype_of(value) if isinstance(value, fx.Node) else None


def _output_values(gm: fx.GraphModule) -> Any:
    return next(n for n in gm.graph.nodes if n.op == "output").args[0]


def _body_outputs(gm: fx.GraphModule) -> tuple[torch.dtype | None, ...]:
    return tuple(_flow(v) for v in pytree.tree_leaves(_output_values(gm)))
