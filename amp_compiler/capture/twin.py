"""The twin: a second trace of the same code, in which every fp32 tensor is a fake of the low-precision dtype.

A graph traced in fp32 hides where the code asks for dtypes: ``x.to(y.dtype)`` and ``x.to(torch.float32)`` look the same
there. In the twin they differ, and the pass ``mark_dtype_origin`` compares the two. Most code only passes dtypes on:
``followed.py`` sees where to while Dynamo reads it for the first time, and only the rest needs a twin.

Under Dynamo the twin is made frame by frame, from inside the backend: Dynamo reads the frame's bytecode a second
time, symbolically, so none of the user's Python runs and no object of the user changes, even where the graph breaks.
Under ``torch.export`` the forward does run a second time, on a deep copy whose tensors are fakes (no memory).

torch 2.13 internals, and why: ``InstructionTranslator.current_tx`` and ``convert_frame.compile_frame`` (the frame that
is being compiled, and the function that reads one; neither has a public equivalent), ``FakeTensorMode.from_tensor`` and
``torch._dynamo.utils.run_node`` (wrapped while the twin is read, for this thread only: there tensors become low, and
operands of two dtypes are promoted where torch would refuse them).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from .. import ir
from ..common.torch_names import is_dtensor
from ..ir.promoting import promoting
from ..policy import Policy
from .followed import reading
from .lower import lower
from .patching import replaced
from .promotion import converted

# ------------------------------------------------------------------------------------------------ Dynamo


class _Seen(Exception):
    """Stops Dynamo once the twin's graph has been recorded: no bytecode is needed."""


def twin_of_frame(policy: Policy, modules: Mapping[int, str]) -> fx.GraphModule | None:
    """Read the frame that Dynamo is compiling once more in ``policy.low``, and return its lowered graph. None if Dynamo
    finds no tensor op there."""
    from torch._dynamo import convert_frame
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._guards import CompileContext

    try:
        frame: Any = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # nothing is being compiled, the graph does not come from Dynamo; torch has no test for that
        return None
    found: list[fx.GraphModule] = []

    def record(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        values = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
        with _fake_mode_of(values):
            found.append(lower(gm, inputs, policy, modules, fakes=[_fresh(v) for v in values], promote=True))
        raise _Seen

    record._torchdynamo_orig_backend = frame.output.compiler_fn  # type: ignore[attr-defined]  # as ``dynamo`` asks
    attempt = CompileContext.get().attempt
    try:
        with _low_fakes(policy.low), reading(), _quiet():
            convert_frame.compile_frame(
                frame.f_code, frame.f_globals, frame.f_locals, frame.f_builtins, frame.closure, record,
                False, set(), frame_state=frame.output.frame_state,
            )  # fmt: skip
    except Exception:
        if not found:
            raise
    finally:
        CompileContext.get().attempt = attempt
    return found[0] if found else None


@contextlib.contextmanager
def _fake_mode_of(values: Sequence[Any]) -> Iterator[None]:
    """Use the fake mode of ``values``: Dynamo gives a backend a new one, but the twin's inputs are fakes of the old."""
    context = torch._guards.TracingContext.get()
    before = context.fake_mode
    context.fake_mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), before)
    try:
        yield
    finally:
        context.fake_mode = before


def _fresh(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or is_dtensor(value):  # of a DTensor only shape and dtype are read
        return value
    fresh: Any = _like(value, ir.retype(value, value.dtype))
    # torch 2.13: a Python float that changes from call to call is a tensor of no dimensions; its ``item()`` is a symbol
    # that Dynamo keeps on the fake, and Dynamo fails on a fake without one
    if (number := getattr(value, "item_memo", None)) is not None:
        fresh.item_memo = number
    return fresh


def _like(value: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Return ``fresh`` with the ``requires_grad`` of ``value``, and a non-leaf, which may be written to, if that is."""
    fresh.requires_grad_(value.requires_grad)
    if value.is_leaf:
        return fresh
    with torch.enable_grad():
        return fresh.clone()


@contextlib.contextmanager
def _low_fakes(low: torch.dtype) -> Iterator[None]:
    """While Dynamo reads: fakes of fp32 tensors are low, and operands of two dtypes are promoted."""
    import torch._dynamo.utils as utils
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    make, run = FakeTensorMode.from_tensor, utils.run_node
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def from_tensor(mode: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        fake = make(mode, tensor, **kwargs)
        if (type(fake) is not FakeTensor and not is_dtensor(fake)) or fake.dtype is not torch.float32:
            return fake
        if id(fake) not in known:
            make_low = _lowered_shard if is_dtensor(fake) else _lowered
            known[id(fake)] = (make_low(fake, low, isinstance(tensor, nn.Parameter)), fake)
        return known[id(fake)][0]

    def run_node(tracer: Any, node: fx.Node, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        call = lambda a, k: run(tracer, node, a, k, nnmodule)  # noqa: E731
        return promoting(call, args, kwargs, in_place=str(node.target).endswith("_") or "setitem" in str(node.target))

    # Dynamo compiles one frame at a time, but export takes no lock
    with replaced(FakeTensorMode, "from_tensor", from_tensor), replaced(utils, "run_node", run_node):
        yield


def _lowered(fake: Any, low: torch.dtype, parameter: bool) -> torch.Tensor:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    # a parameter may first be used inside of a vmap, but isn't a batched tensor
    with temporarily_clear_interpreter_stack(), fake.fake_mode, torch.no_grad():
        new = torch.empty_strided(fake.size(), fake.stride(), dtype=low, device=fake.device)
        return nn.Parameter(new, fake.requires_grad) if parameter else _like(fake, new)


def _lowered_shard(fake: Any, low: torch.dtype, parameter: bool) -> torch.Tensor:
    with fake.to_local().fake_mode, torch.no_grad():
        new = fake.detach().to(low)
        return nn.Parameter(new, fake.requires_grad) if parameter else new.requires_grad_(fake.requires_grad)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the second reading out of Dynamo's counts, from which reports learn what was not captured."""
    from torch._dynamo.utils import counters

    before = {key: copy.copy(value) for key, value in counters.items()}
    try:
        yield
    finally:
        counters.clear()
        counters.update(before)


# ------------------------------------------------------------------------------------------------ export


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy with its own Python state whose parameters and buffers are the model's own tensors."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(t): t for t in tensors})


@contextlib.contextmanager
def low_trace(low: torch.dtype) -> Iterator[None]:
    """Make ``torch.export`` trace in ``low`` inside the block."""
    with _low_fakes(low), _PromotingMode():
        yield


class _PromotingMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = "setitem" in name or (name.endswith("_") and not name.endswith("__"))
        return promoting(lambda a, k: func(*a, **k), args, kwargs or {}, in_place, converted)
