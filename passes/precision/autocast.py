"""The rule of ``Policy.torch``: exactly the lists and rules of ``torch.autocast``."""

from __future__ import annotations

import torch

from amp_compiler import ir
from amp_compiler.common.errors import BannedOpError
from amp_compiler.ir import Decision, decisions
from amp_compiler.ir.regions import Region
from amp_compiler.policy import Rule
from amp_compiler.policy.ops import torch_lists
from amp_compiler.policy.ops.row import OpClass

from . import code, writes
from .state import At

_USERS_LISTS = (Rule.WHITE_LIST, Rule.BLACK_LIST)


def like_autocast(at: At) -> Decision | None:
    """Under ``Policy.torch``, autocast's lists decide everything that the rules above leave open."""
    device = at.policy.autocast_device
    if device is None:
        return None
    node, low, region = at.node, at.policy.low, at.node.meta.get(ir.REGION)
    by_region = at.forced is None or at.forced.rule is Rule.REGION
    if isinstance(region, Region) and region.kind == "autocast" and by_region:
        if region.dtype is None:
            return decisions.as_it_comes(node, str(region), Rule.REGION)
        low = region.dtype
    elif at.forced is not None and not at.written and not at.state.aliases.is_view(node):
        return decisions.cast(node, at.forced.dtype, at.forced.reason, at.forced.rule)
    if at.choice.rule in _USERS_LISTS:
        by_user = low if at.cls is OpClass.LOW else torch.float32
        return writes.in_place(at) or decisions.cast(node, by_user, at.choice.reason, at.choice.rule)
    return _by_lists(at, device, low)


def _by_lists(at: At, device: str, low: torch.dtype) -> Decision:
    lists, overload, node = torch_lists.LISTS[device], ir.overload_name(at.node), at.node
    if overload in lists["banned"]:
        where, hint = ir.source_line(node), "use binary_cross_entropy_with_logits."
        message = f"torch.autocast bans {at.name} on {device}: {hint} At {where or node.name}."
        raise BannedOpError(message, node=node.name, source=where, hint=hint)
    if overload in lists["low"]:
        return decisions.cast(node, low, "torch.autocast runs it in low precision", Rule.AUTOCAST)
    if overload in lists["fp32_set_dtype"] and (explicit := code.explicit_dtype(at)) is not None:
        return explicit
    if overload in lists["fp32_set_dtype"] or overload in lists["fp32"]:
        return decisions.cast(node, torch.float32, "torch.autocast runs it in fp32", Rule.AUTOCAST)
    if overload in lists["promote"]:
        widest = decisions.widest([ir.dtype_of(a) for _, a in at.floats])
        return decisions.cast(node, widest, "torch.autocast promotes it to its widest input", Rule.AUTOCAST)
    reason = "torch.autocast does not list it: torch's own type promotion"
    return decisions.as_it_comes(node, reason, Rule.AUTOCAST)
