"""The private names of torch that packages other than ``capture/`` use, in one place, each with the reason.

Outside of ``capture/`` and this module, nothing may use a name that torch marks as private with an underscore, which
``tests/test_layers.py`` checks; names of ATen ops (``torch.ops.aten._to_copy``) are public. Torch 2.13 to 2.15 have all
of these; what differs between releases is in ``compat.py``, which does not import torch. Functions that run while a
model is called are only renamed here, not wrapped: a wrapper would be one more Python frame for Dynamo to look at.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

# Inside this, ops skip autograd: a hand-written autograd kernel calls its own op like this.
from torch._C import _AutoDispatchBelowAutograd as below_autograd

# Switch autocast off, or ask whether it is on, for every device at once: torch.autocast takes one device.
from torch._C import _DisableAutocast as no_autocast
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled

# What torch.jit.is_tracing asks, after two questions about scripting.
from torch._C import _is_tracing as is_jit_tracing

# Push a TorchFunctionMode on the stack and pop the innermost: ``with`` can only enter one as the innermost.
from torch._C import _pop_torch_function_stack as pop_function_mode
from torch._C import _push_on_torch_function_stack as push_function_mode

# Switch gradients on or off, without a context manager, which takes as long as two ops.
from torch._C import _set_grad_enabled as set_grad_enabled

# Whether a profiler records this thread; torch.autograd has no public question for it.
from torch._C._autograd import _profiler_enabled as is_profiling

# The classes of a node's target; torch.ops holds their instances and has no public name for them.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

# The class of all convolutions; nn exports its subclasses only.
from torch.nn.modules.conv import _ConvNd as ConvNd

# The hooks of all optimizers: there is a function to add one, and none to ask for them.
from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_pre_hooks

# Trees of arguments and results, as torch.export, Dynamo and FX use them: torch has no public module for them.
from torch.utils import _pytree as pytree

# Disable all TorchDispatchModes, such as those of fake tensors and the tracer; and get the innermost one, or None.
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as dispatch_mode

__all__ = [
    "ConvNd", "HigherOrderOperator", "OpOverload", "OpOverloadPacket", "amp_update_scale_", "below_autograd",
    "collectives", "dispatch_mode", "foreach_add_", "foreach_copy_", "foreach_mul_", "foreach_norm",
    "foreach_unscale_", "foreach_zero_", "inside_ddp", "is_any_autocast_enabled", "is_composite", "is_dtensor",
    "is_jit_tracing", "is_profiling", "loads_by_itself", "no_autocast", "optimizer_post_hooks", "optimizer_pre_hooks",
    "pop_function_mode", "profiler_config", "push_function_mode", "pytree", "schema_named", "schema_of", "schemas_of",
    "set_grad_enabled", "unregister", "without_dispatch_modes",
]  # fmt: skip

# One kernel for a list of tensors. torch's optimizers use them, but there are no public functions for them.
foreach_norm = torch._foreach_norm
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_zero_ = torch._foreach_zero_
# The kernels of torch.amp.GradScaler: one checks and unscales a list of gradients, one updates the scale.
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
amp_update_scale_ = torch._amp_update_scale_

# The functional collectives as ops, as they are in a graph; torch.distributed has functions only.
collectives = torch.ops._c10d_functional


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor. Nothing of ``torch.distributed`` is imported for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def inside_ddp(module: Any) -> Any:
    """The model inside of a ``DistributedDataParallel``; None for any other module."""
    known = sys.modules.get("torch.nn.parallel.distributed")
    return module.module if known is not None and isinstance(module, known.DistributedDataParallel) else None


def schema_of(op: OpOverload) -> Any:
    """Return the schema of an op: its name, and its arguments with their types and which of them it writes to."""
    return op._schema


def schemas_of(name: str) -> list[Any]:
    """Return the schemas of all overloads of an op by its qualified name (``"aten::add"``); empty if there is none."""
    return list(torch._C._jit_get_schemas_for_operator(name))


def schema_named(name: str, overload: str) -> Any:
    """Return the schema of one overload, by the names that the profiler records; None if there is no such op."""
    try:
        return torch._C._get_schema(name, overload)
    except RuntimeError:
        return None


def is_composite(name: str) -> bool:
    """True if an op (``"aten::linear"``, ``"aten::to.dtype"``) is composed of others and has no kernel of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def profiler_config() -> Any:
    """Return settings that make ``torch.profiler`` record overloads, which its public arguments cannot do."""
    return torch._C._profiler._ExperimentalConfig(capture_overload_names=True)


def unregister(library: torch.library.Library) -> None:
    """Unregister the kernels of a library now; otherwise that happens when it is garbage-collected."""
    library._destroy()


def loads_by_itself(module: nn.Module) -> bool:
    """True if a module loads its state with code of its own, in addition to ``nn.Module.load_state_dict``."""
    cls = type(module)
    return (
        cls._load_from_state_dict is not nn.Module._load_from_state_dict
        or cls.set_extra_state is not nn.Module.set_extra_state
        or bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)
    )
