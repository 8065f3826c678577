"""Private names of torch that rooms other than ``capture/`` use, in one place, each with the reason.

Outside of ``capture/`` and this module nothing may name what torch marks as private by an underscore, and
``tests/test_layers.py`` checks it; names of ATen ops (``torch.ops.aten._to_copy``) are public. Torch 2.13 to 2.15 have
all of these; what differs between releases is in ``compat.py``, which does not import torch. What runs while a model
is called is named here and not wrapped: a Python frame of ours would be one more for Dynamo to look at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Ops inside skip autograd: how a hand-written autograd kernel calls the op that it belongs to.
from torch._C import _AutoDispatchBelowAutograd as below_autograd

# Autocast off, and whether it is on, for every device at once: torch.autocast takes one device.
from torch._C import _DisableAutocast as no_autocast
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled

# Put a TorchFunctionMode on the stack and take the innermost off: ``with`` can only enter one innermost.
from torch._C import _pop_torch_function_stack as pop_function_mode
from torch._C import _push_on_torch_function_stack as push_function_mode

# The classes of a node's target; torch.ops holds their instances and has no public name for them.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

# The class of all convolutions; nn exports its subclasses only.
from torch.nn.modules.conv import _ConvNd as ConvNd

# Trees of arguments and results, as torch.export, Dynamo and FX take them: torch has no public module for them.
from torch.utils import _pytree as pytree

# No TorchDispatchMode inside (fake tensors' and the tracer's are such modes); and the innermost in force, or None.
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as dispatch_mode

__all__ = [
    "ConvNd", "HigherOrderOperator", "OpOverload", "OpOverloadPacket", "amp_update_scale_", "below_autograd",
    "collectives", "dispatch_mode", "foreach_add_", "foreach_copy_", "foreach_mul_", "foreach_norm",
    "foreach_unscale_", "foreach_zero_", "is_any_autocast_enabled", "is_composite", "loads_by_itself", "no_autocast",
    "pop_function_mode", "profiler_config", "push_function_mode", "pytree", "schema_named", "schema_of", "schemas_of",
    "unregister", "without_dispatch_modes",
]  # fmt: skip

# One kernel for a list of tensors. torch's optimizers are made of them, and no public function gives them out.
foreach_norm = torch._foreach_norm
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_zero_ = torch._foreach_zero_
# What torch.amp.GradScaler is made of: one kernel that checks and unscales a list, one that moves the scale.
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
amp_update_scale_ = torch._amp_update_scale_

# The functional collectives as ops, which is how they stand in a graph; torch.distributed has functions only.
collectives = torch.ops._c10d_functional


def schema_of(op: OpOverload) -> Any:
    """The schema of an op: its name, and its arguments with their types and which of them it writes."""
    return op._schema


def schemas_of(name: str) -> list[Any]:
    """The schemas of all overloads of an op by its qualified name (``"aten::add"``); empty if there is no such op."""
    return list(torch._C._jit_get_schemas_for_operator(name))


def schema_named(name: str, overload: str) -> Any:
    """The schema of one overload, by names as the profiler records them; None if there is no such op."""
    try:
        return torch._C._get_schema(name, overload)
    except RuntimeError:
        return None


def is_composite(name: str) -> bool:
    """True if an op (``"aten::linear"``, ``"aten::to.dtype"``) is made of others and has no kernel of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def profiler_config() -> Any:
    """Settings for ``torch.profiler`` to record overloads; its public arguments cannot ask for them."""
    return torch._C._profiler._ExperimentalConfig(capture_overload_names=True)


def unregister(library: torch.library.Library) -> None:
    """Take back the kernels that a library has registered; otherwise that happens when it is garbage."""
    library._destroy()


def loads_by_itself(module: nn.Module) -> bool:
    """True if a module loads its state by code of its own, beside what ``nn.Module.load_state_dict`` does for all."""
    cls = type(module)
    return (
        cls._load_from_state_dict is not nn.Module._load_from_state_dict
        or cls.set_extra_state is not nn.Module.set_extra_state
        or bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)
    )
