"""A model without its weights: the same modules, with fakes in place of their tensors, to be traced for shapes alone.

torch 2.13 internals: ``FakeTensorMode`` (no public name gives out tensors that have a shape, a dtype and a device and
no memory; those of the meta device lack kernels for the gradients of some losses).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_config
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..common.torch_names import pytree


def fake_call(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A copy of the model and of its arguments in which every tensor is a fake on the CPU. Nothing is computed, and the
    model may be on the meta device, or made under a ``FakeTensorMode``."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    for module in model.modules():
        held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        loose = (v for v in vars(module).values() if isinstance(v, FakeTensor) or (_is_tensor(v) and v.is_meta))
        for tensor in (*held, *loose):
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor, mode)
    copied = copy.deepcopy(model, memo)
    given, named = pytree.tree_map_only(torch.Tensor, lambda t: _fake(t, mode), (tuple(args), dict(kwargs or {})))
    return copied, given, named


@contextlib.contextmanager
def sizes_from_data() -> Iterator[None]:
    """A graph that holds sizes which depend on data may be traced again on its own fakes: torch makes new symbols for
    such sizes and would miss them among the results."""
    config: Any = symbolic_config  # torch installs ``patch`` when it is imported
    with config.patch(soft_pending_unbacked_not_found_error=True):
        yield


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode, torch.no_grad():
        strides = tensor.stride() if tensor.layout is torch.strided else None
        if strides is None:
            made = torch.empty(tensor.size(), dtype=tensor.dtype)
        else:
            made = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
