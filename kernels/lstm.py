"""``amp::lstm_layer``: one layer of an LSTM over a whole sequence, in one direction, and ``amp::lstm_layer_backward``.

    lstm_layer(Tensor x, Tensor h, Tensor c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, bool reverse,
               bool keeps=True) -> (Tensor out, Tensor h_n, Tensor c_n, Tensor gates, Tensor cells)

``x`` is [length, batch, inputs], ``h`` and ``c`` are [batch, hidden], the weights as in ``nn.LSTM`` (gates in the order
input, forget, cell, output). All have one dtype: fp32, fp16 or bf16. ``gates`` (after their activation) and ``cells``
are what the backward needs; without ``keeps`` they are empty.

In low precision, every product has low operands and fp32 sums, as in cuDNN: the state that is passed to the next step
is rounded, the cell stays in fp32 from the first step to the last, and everything in between is fp32.

Decomposed, a sequence of 32 steps is more than a thousand ops of a graph: it would be compiled again for each length,
in half a minute, and be slower than torch's layer under autocast. Here, products that do not depend on the state are
computed for all steps at once, and the rest is a loop: in C++ (``cpp/lstm.h``) or, where that is not built, in Python
with a dozen calls per step. This is for CPUs only: elsewhere the layer is decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.common.torch_names import below_autograd

from . import cast_matmul as _defines_cast_matmul  # noqa: F401
from . import registry

LOW = (torch.float16, torch.bfloat16)

_LIBRARY = torch.library.Library("amp", "FRAGMENT")
_LIBRARY.define(
    "lstm_layer(Tensor x, Tensor h, Tensor c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, bool reverse,"
    " bool keeps=True) -> (Tensor out, Tensor h_n, Tensor c_n, Tensor gates, Tensor cells)"
)
_LIBRARY.define(
    "lstm_layer_backward(Tensor? grad_out, Tensor? grad_h, Tensor? grad_c, Tensor x, Tensor h, Tensor c, Tensor w_ih,"
    " Tensor w_hh, Tensor out, Tensor gates, Tensor cells, bool reverse, bool for_x)"
    " -> (Tensor x, Tensor h, Tensor c, Tensor w_ih, Tensor w_hh, Tensor bias)"
)


def reference(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of the op, step by step in fp64 between its roundings: (out, h_n, c_n)."""
    dtype, wide = x.dtype, torch.float64
    bias = sum(b.to(wide) for b in (b_ih, b_hh) if b is not None)
    state, cell = h, c.to(wide)
    steps: list[Tensor] = [state] * len(x)
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        gates = x[t].to(wide) @ w_ih.to(wide).T + state.to(wide) @ w_hh.to(wide).T + bias
        i, f, g, o = gates.chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = (o.sigmoid() * cell.tanh()).to(dtype)
        steps[t] = state
    return torch.stack(steps), state, cell.to(dtype)


def _product(a: Tensor, b: Tensor, low: torch.dtype | None, out: torch.dtype) -> Tensor:
    result: Tensor = torch.mm(a, b) if low is None else torch.ops.amp.cast_matmul.default(a, b, None, low, out)
    return result


def _order(length: int, reverse: bool) -> Sequence[int]:
    return range(length - 1, -1, -1) if reverse else range(length)


def _forward(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    reverse: bool, keeps: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if registry.loaded():
        return torch.ops.amp_cpu.lstm_forward(  # type: ignore[no-any-return]
            x, h, c, w_ih, w_hh, b_ih, b_hh, reverse, keeps
        )
    length, batch, _ = x.shape
    hidden = w_hh.shape[1]
    low = x.dtype if x.dtype in LOW else None
    gates = _product(x.flatten(0, 1), w_ih.t(), low, torch.float32)
    for bias in (b_ih, b_hh):
        if bias is not None:
            gates.add_(bias.float())
    gates = gates.view(length, batch, 4 * hidden)
    out, cells = x.new_empty(length, batch, hidden), gates.new_empty(length, batch, hidden)
    _steps(gates, h.float().contiguous(), c.float().contiguous(), w_hh.float(), out, cells, reverse)
    last = 0 if reverse else -1
    kept = (gates.to(x.dtype), cells) if keeps else (x.new_empty(0), cells.new_empty(0))
    return out, out[last].clone(), cells[last].to(x.dtype, copy=True), *kept


def _steps(
    gates: Tensor, state: Tensor, cell: Tensor, w_hh: Tensor, out: Tensor, cells: Tensor, reverse: bool
) -> None:
    """Run all steps. ``gates`` holds the inputs' part of the sums, and afterwards the activated gates; ``out`` and
    ``cells`` are written."""
    length, batch, hidden = out.shape
    low = out.dtype if out.dtype in LOW else None
    whole = gates.unbind(0)
    early, late = gates[..., : 2 * hidden].unbind(0), gates[..., 3 * hidden :].unbind(0)
    i, f, g, o = (part.unbind(0) for part in gates.split(hidden, -1))
    outs, cs = out.unbind(0), cells.unbind(0)
    right, scratch = w_hh.t(), gates.new_empty(batch, hidden)
    for t in _order(length, reverse):
        whole[t].addmm_(state, right)
        early[t].sigmoid_()
        g[t].tanh_()
        late[t].sigmoid_()
        cell = torch.mul(f[t], cell, out=cs[t]).addcmul_(i[t], g[t])
        torch.tanh(cell, out=scratch)
        if low is None:
            state = torch.mul(o[t], scratch, out=outs[t])
        else:
            outs[t].copy_(scratch.mul_(o[t]))
            state = scratch.copy_(outs[t])  # the next product reads the rounded state


def _before(first: Tensor, steps: Tensor, reverse: bool) -> Tensor:
    """Return the value that each step started with."""
    first = first.to(steps.dtype).unsqueeze(0)
    return torch.cat((steps[1:], first) if reverse else (first, steps[:-1]))


def _backward(
    grad_out: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, x: Tensor, h: Tensor, c: Tensor,
    w_ih: Tensor, w_hh: Tensor, out: Tensor, gates: Tensor, cells: Tensor, reverse: bool, for_x: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    length, batch, _ = x.shape
    hidden = w_hh.shape[1]
    low, dtype = x.dtype if x.dtype in LOW else None, x.dtype
    state, cell = (
        cells.new_zeros(batch, hidden) if grad is None else grad.float().clone(memory_format=torch.contiguous_format)
        for grad in (grad_h, grad_c)
    )
    sums = x.new_empty(length, batch, 4 * hidden)
    steps = _steps_back_in_cpp if registry.loaded() else _steps_back
    steps(grad_out, state, cell, gates, cells, c.float(), w_hh, sums, reverse)
    flat = sums.view(length * batch, 4 * hidden)
    turned = flat.t()
    return (
        _product(flat, w_ih, low, dtype).view(x.shape) if for_x else x.new_empty(0),
        state.to(dtype),
        cell.to(dtype),
        _product(turned, x.flatten(0, 1), low, dtype),
        _product(turned, _before(h, out, reverse).view(length * batch, hidden), low, dtype),
        flat.sum(0, dtype=torch.float32).to(dtype),
    )


def _steps_back_in_cpp(
    grad_out: Tensor | None, state: Tensor, cell: Tensor, gates: Tensor, cells: Tensor, c: Tensor, w_hh: Tensor,
    sums: Tensor, reverse: bool,
) -> None:  # fmt: skip
    given = None if grad_out is None else grad_out.contiguous()
    torch.ops.amp_cpu.lstm_backward(given, state, cell, gates, cells, c.contiguous(), w_hh, sums, reverse)


def _steps_back(
    grad_out: Tensor | None, state: Tensor, cell: Tensor, gates: Tensor, cells: Tensor, c: Tensor, right: Tensor,
    sums: Tensor, reverse: bool,
) -> None:  # fmt: skip
    """Run all steps backward and write ``sums``, the gradients of the gates before their activation. ``state`` and
    ``cell`` hold gradients of the last step's values, and afterwards those of the first."""
    length, batch, hidden = cells.shape
    right = right.float()
    i, f, g, o = gates.float().split(hidden, -1)
    squashed = torch.tanh(cells)
    # the derivatives of the activations, by which the gates' gradients are multiplied, for all steps at once
    slopes = cells.new_empty(length, batch, 4, hidden)
    for part, other, value, square in (
        (0, g, i, False), (1, _before(c, cells, reverse), f, False), (2, i, g, True), (3, squashed, o, False)
    ):  # fmt: skip
        derivative = torch.addcmul(torch.ones((), dtype=torch.float32), value, value, value=-1) if square else (
            torch.addcmul(value, value, value, value=-1)
        )
        torch.mul(other, derivative, out=slopes[:, :, part])
    into_cell = torch.addcmul(o, o * squashed, squashed, value=-1).unbind(0)
    wide = slopes.view(length, batch, 4 * hidden).unbind(0)
    first_three, last = slopes[:, :, :3].unbind(0), slopes[:, :, 3].unbind(0)
    forget, kept = f.unbind(0), sums.unbind(0)
    given = None if grad_out is None else grad_out.float().unbind(0)
    for t in reversed(_order(length, reverse)):
        if given is not None:
            state.add_(given[t])
        cell.addcmul_(state, into_cell[t])
        first_three[t].mul_(cell.unsqueeze(1))
        last[t].mul_(state)
        rounded = kept[t].copy_(wide[t])
        torch.mm(wide[t].copy_(rounded), right, out=state)
        cell.mul_(forget[t])


def _fake(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    reverse: bool, keeps: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    length, batch, _ = x.shape
    hidden = w_hh.shape[1]
    return (
        x.new_empty(length, batch, hidden), x.new_empty(batch, hidden), x.new_empty(batch, hidden),
        x.new_empty(length, batch, 4 * hidden) if keeps else x.new_empty(0),
        x.new_empty((length, batch, hidden) if keeps else (0,), dtype=torch.float32),
    )  # fmt: skip


def _fake_backward(
    grad_out: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, x: Tensor, h: Tensor, c: Tensor,
    w_ih: Tensor, w_hh: Tensor, out: Tensor, gates: Tensor, cells: Tensor, reverse: bool, for_x: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gave = x.new_empty(x.shape) if for_x else x.new_empty(0)
    rest = (t.new_empty(t.shape) for t in (h, c, w_ih, w_hh))
    return (gave, *rest, x.new_empty(w_hh.shape[0]))  # type: ignore[return-value]


class _LstmLayer(torch.autograd.Function):
    """Registered by hand: ``torch.library.register_autograd`` costs more per call than a few steps do."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        x, h, c, w_ih, w_hh, b_ih, b_hh, reverse = args[:8]
        with below_autograd():
            results = torch.ops.amp.lstm_layer.default(*args[:8])  # kept, whatever the caller said
        out, _, _, gates, cells = results
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, h, c, w_ih, w_hh, out, gates, cells)
        ctx.mark_non_differentiable(gates, cells)
        ctx.reverse, ctx.biases = reverse, (b_ih is not None, b_hh is not None)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_out, grad_h, grad_c = gradients[:3]
        x, h, c, w_ih, w_hh, out, gates, cells = ctx.saved_tensors
        wants = ctx.needs_input_grad
        found = torch.ops.amp.lstm_layer_backward.default(
            grad_out, grad_h, grad_c, x, h, c, w_ih, w_hh, out, gates, cells, ctx.reverse, wants[0]
        )
        bias = found[5]
        grads = (*found[:5], *(bias if there else None for there in ctx.biases))
        gave = (grad if wanted else None for grad, wanted in zip(grads, wants, strict=False))
        return *gave, *(None,) * (len(wants) - len(grads))


def _autograd(*args: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        apply: Callable[..., tuple[Tensor, ...]] = _LstmLayer.apply  # torch 2.13 gives it no type
        return apply(*args)
    with below_autograd():
        return torch.ops.amp.lstm_layer.default(*args)  # type: ignore[no-any-return]


FORWARD, BACKWARD = torch.ops.amp.lstm_layer.default, torch.ops.amp.lstm_layer_backward.default
#: the results that only a backward reads
SAVED = (3, 4)

_LIBRARY.impl("lstm_layer", _forward, "CPU")
_LIBRARY.impl("lstm_layer", _autograd, "Autograd")
_LIBRARY.impl("lstm_layer_backward", _backward, "CPU")
torch.library.register_fake("amp::lstm_layer", _fake, lib=_LIBRARY)
torch.library.register_fake("amp::lstm_layer_backward", _fake_backward, lib=_LIBRARY)
