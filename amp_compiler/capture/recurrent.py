"""Lowering of recurrent ops: they are decomposed into layers, and a layer of an LSTM on a CPU becomes one op.

torch 2.13 decomposes ``aten.lstm``, ``gru`` and ``rnn_*`` in Python while it traces (``torch._decomp``). Two things are
done differently here. *Dropout* between layers: torch's decomposition omits it (its test for the last layer,
``num_layers < i - 1``, is never true), so such a model would silently train without it. *An LSTM layer* on a CPU is
``amp::lstm_layer`` (``kernels/lstm.py``), one op for the whole sequence instead of thirty ops per time step.
``Policy.torch`` decomposes it too: its results must be those of autocast around torch's own cells.

An exported program keeps ``aten.lstm`` as one op. torch runs it step by step, with native products, where oneDNN has no
such layer for the dtype; ``of_program`` finds those that are run as layers of ours instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .. import ir
from ..common.torch_names import pytree
from ..kernels.cpu import runs_wide
from ..kernels.lstm import LOW  # and the op
from ..policy import Policy

aten = torch.ops.aten
_OPS = (aten.lstm.input, aten.lstm.data, aten.gru.input, aten.gru.data, aten.rnn_tanh.input, aten.rnn_tanh.data,
        aten.rnn_relu.input, aten.rnn_relu.data)  # fmt: skip

Results = tuple[Tensor, ...]
#: any kind of layer: (input, states, parameters, biases, train, both directions) -> (output, new states)
Layer = Callable[[Tensor, list[Tensor], list[Tensor], bool, bool, bool], Results]


def decompositions(policy: Policy) -> dict[Any, Callable[..., Any]]:
    """Return the decomposition of each recurrent op."""
    from torch._decomp import get_decompositions

    torchs = {**get_decompositions(_OPS), aten.lstm.input: _lstm}
    whole = policy.autocast_device is None
    return {op: partial(_packed if op._overloadname == "data" else _padded, torchs[op], whole) for op in _OPS}


def of_program(graph: fx.GraphModule, policy: Policy) -> dict[Any, Callable[..., Any]]:
    """Return the decomposition of an exported program's LSTMs into layers of ours; empty if one of them has a form that
    our op does not run, or if this CPU has units for its products, which oneDNN's own layer uses."""
    found = [n for _, inner in ir.all_graphs(graph) for n in inner.graph.nodes if n.target is aten.lstm.input]
    if policy.autocast_device is not None or not found or not all(map(_runs_as_ours, found)):
        return {}
    return {aten.lstm.input: decompositions(policy)[aten.lstm.input]}


def _runs_as_ours(node: fx.Node) -> bool:
    x, states, params = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], node.args[:3])
    return x.dtype in LOW and runs_wide(x.dtype) and _is_ours(x, states, params)


def _lstm(
    input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Results:  # fmt: skip
    """torch's own decomposition (torch 2.13: ``lstm_impl``), except that it never chooses ``mkldnn_rnn_layer``, which
    AOTAutograd cannot differentiate. The switch for that choice, ``torch.backends.mkldnn.enabled``, would act on the
    whole process."""
    from torch._decomp import decompositions as d

    layers = d.gather_params(params, has_biases, hx[0].size(2) != hx[1].size(2))
    out, after = d._rnn_helper(
        input, list(zip(hx[0], hx[1], strict=True)), layers, has_biases, num_layers, dropout, train, bidirectional,
        batch_first, d.one_layer_lstm,
    )  # fmt: skip
    hidden, cells = zip(*after, strict=True)
    return out, torch.stack(hidden, 0), torch.stack(cells, 0)


def _padded(
    torchs: Callable[..., Results], whole: bool, input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> Results:  # fmt: skip
    def torch_layer(
        x: Tensor, states: list[Tensor], weights: list[Tensor], biases: bool, train: bool, both: bool
    ) -> Results:
        given = states[0] if isinstance(hx, Tensor) else states
        return torchs(x, given, weights, biases, 1, 0.0, train, both, False)

    states = _listed(hx)
    x = input.transpose(0, 1) if batch_first else input
    if isinstance(x.shape[0], int) and x.shape[0] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")  # torch's own message
    own = whole and len(states) == 2 and _is_ours(x, states, params)
    out, *after = _layers(
        _lstm_layer if own else torch_layer, x, states, params, has_biases, num_layers, dropout, train, bidirectional
    )
    return (out.transpose(0, 1) if batch_first else out, *after)


def _packed(
    torchs: Callable[..., Results], whole: bool, data: Tensor, batch_sizes: Tensor, hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> Results:  # fmt: skip
    def torch_layer(
        x: Tensor, states: list[Tensor], weights: list[Tensor], biases: bool, train: bool, both: bool
    ) -> Results:
        given = states[0] if isinstance(hx, Tensor) else states
        return torchs(x, batch_sizes, given, weights, biases, 1, 0.0, train, both)

    return _layers(torch_layer, data, _listed(hx), params, has_biases, num_layers, dropout, train, bidirectional)


def _listed(hx: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [hx] if isinstance(hx, Tensor) else list(hx)


def _layers(
    layer: Layer, x: Tensor, states: list[Tensor], params: Sequence[Tensor], biases: bool, number: int, dropout: float,
    train: bool, both: bool,
) -> Results:  # fmt: skip
    directions, size = 2 if both else 1, len(params) // number
    after: list[list[Tensor]] = [[] for _ in states]
    for index in range(number):
        begun = [state[index * directions : (index + 1) * directions] for state in states]
        x, *ended = layer(x, begun, list(params[index * size : (index + 1) * size]), biases, train, both)
        for kept, state in zip(after, ended, strict=True):
            kept.append(state)
        if train and dropout > 0 and index < number - 1:
            x = F.dropout(x, dropout, training=True)
    return (x, *(torch.cat(kept) if number > 1 else kept[0] for kept in after))


def _is_ours(x: Tensor, states: list[Tensor], params: Sequence[Tensor]) -> bool:
    """True if our op can run the layers: not with a projection, whose state is narrower than its cell, nor in fp64."""
    h, c = states
    tensors = (x, h, c, *params)
    known = all(t.device.type == "cpu" and t.dtype in (torch.float32, *LOW) for t in tensors)
    return known and h.shape[-1] == c.shape[-1]


def _lstm_layer(
    x: Tensor, states: list[Tensor], weights: list[Tensor], biases: bool, train: bool, both: bool
) -> Results:
    h, c = states
    size = 4 if biases else 2
    outs, hs, cs = [], [], []
    for direction in range(2 if both else 1):
        w_ih, w_hh, *bias = weights[direction * size : (direction + 1) * size]
        b_ih, b_hh = bias if bias else (None, None)
        found = torch.ops.amp.lstm_layer(x, h[direction], c[direction], w_ih, w_hh, b_ih, b_hh, direction == 1)
        outs.append(found[0])
        hs.append(found[1])
        cs.append(found[2])
    return torch.cat(outs, -1) if both else outs[0], torch.stack(hs), torch.stack(cs)
