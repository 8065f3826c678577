"""What ``torch.distributed`` has done to a model: modules whose hooks Dynamo must not see.

``fully_shard`` gives a module hooks that gather its parameters before its forward and free them afterwards. They are
disabled for Dynamo, so that each such module, a *unit*, ends the graph around it: its hooks run as plain Python and its
forward is captured by itself.

torch 2.13 internals, and why: ``_get_module_state`` (a unit's ``MixedPrecisionPolicy``),
``InstructionTranslatorBase.maybe_has_backedge`` (Dynamo leaves a function as plain Python
where a graph ends inside a loop, and a model calls its units in loops).
"""

from __future__ import annotations

import dis
import functools
import sys
from typing import Any

import torch
from torch import nn

from ..common.torch_names import inside_ddp
from .handle import innermost


def is_unit(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module itself. Nothing of ``torch.distributed`` is imported for it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def has_units(target: Any) -> bool:
    """Whether a model, or the model of a bound method, is a unit or holds one."""
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    return isinstance(owner, nn.Module) and any(map(is_unit, owner.modules()))


def is_wrapped(target: Any) -> bool:
    """Whether ``torch.distributed`` has changed how a model is called: DistributedDataParallel, or ``fully_shard``."""
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    return isinstance(owner, nn.Module) and (inside_ddp(owner) is not None or has_units(owner))


def given_low(target: Any) -> frozenset[torch.dtype]:
    """The low dtypes in which units have their parameters and inputs, by a ``MixedPrecisionPolicy`` of the user's."""
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    units: list[Any] = [m for m in owner.modules() if is_unit(m)] if isinstance(owner, nn.Module) else []
    if not units:
        return frozenset()
    from torch.distributed._composable_state import _get_module_state

    # fully_shard(amp_compile(model)) leaves its state with the compiled module, beside the one that is looked at here
    states: list[Any] = [state for unit in units if (state := _get_module_state(unit)) is not None]
    dtypes = {state._mp_policy.param_dtype for state in states}
    return frozenset(dtypes & {torch.float16, torch.bfloat16})


#: words of Dynamo's about graph breaks that wrappers make by themselves, or their files; what they call is captured all
#: the same
_OWN_BREAKS = (
    "set_runtime_stats_and_log", "DistributedDataParallel", "torch.nn.parallel.distributed",
    "the function `disable` in file", "_fsdp_common.py",
)  # fmt: skip


def is_own_break(reason: str) -> bool:
    """Whether a wrapper's own code, and none of the model's, ended a graph."""
    told = getattr(reason, "whole", reason) + getattr(reason, "source", "")
    return any(words in told for words in _OWN_BREAKS)


def units_note(target: Any) -> str | None:
    """What a report says about a model that is captured unit by unit."""
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    number = sum(map(is_unit, owner.modules())) if isinstance(owner, nn.Module) else 0
    if not number:
        return None
    units = "unit" if number == 1 else "units"
    return f"fully_shard made {number} {units} of this model: each ends a graph by its hooks, and is captured by itself"


@functools.cache
def allow_breaks_in_loops() -> None:
    """Where a model holds units, a graph may end inside a loop: each round gets a graph of its own. The rest of the
    loop needs its iterator, and Dynamo can only hand on that of a tuple. For other models nothing changes."""
    from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker

    asked = InstructionTranslatorBase.maybe_has_backedge
    table = InstructionTranslator.dispatch_table
    get_iter: Any = table[dis.opmap["GET_ITER"]]

    def maybe_has_backedge(self: Any) -> bool:
        return not _unrolls(self) and asked(self)

    def iterate(self: Any, instruction: Any) -> None:
        if _unrolls(self) and _is_finite(self.stack[-1]):
            self.call_function(VariableTracker.build(self, tuple), [self.pop()], {})
        get_iter(self, instruction)

    InstructionTranslatorBase.maybe_has_backedge = maybe_has_backedge  # type: ignore[method-assign]
    table[dis.opmap["GET_ITER"]] = iterate


def _unrolls(translator: Any) -> bool:
    handle = innermost(translator.output.compiler_fn)
    return handle is not None and handle.unrolls


def _is_finite(iterable: Any) -> bool:
    """Whether something that Dynamo is about to iterate over can be made a tuple: containers of modules, views of
    dictionaries, ``zip`` and ``enumerate``."""
    from torch._dynamo.variables.dicts import DictViewVariable
    from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
    from torch._dynamo.variables.iter import ZipVariable

    if isinstance(iterable, LocalGeneratorObjectVariable):
        return iterable.get_code().co_qualname == "enumerate"
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return isinstance(iterable, (DictViewVariable, ZipVariable)) or isinstance(
        getattr(iterable, "value", None), containers
    )
