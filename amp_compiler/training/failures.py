"""Why a training step cannot be one graph, and whose mistake it is when it cannot run at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.dynamo import RECOMPILE_LIMIT_REACHED
from ..capture.remedies import Reason, remedy
from ..common.errors import PipelineError, VerifyError
from ..common.torch_names import inside_ddp, is_dtensor, pytree
from ..parallel.shards import is_divided
from .owner import Owner
from .rerun import undisturbed
from .window import Batch

_BREAK = "graph break: "  # how a report begins with a break
_MARK = "requires_grad_()"


def needs_autograd(owner: Owner, given: Iterable[Tensor], *, first: bool) -> str | None:
    """Return why gradients must come from autograd itself, for example because a hook waits for them; None if not.
    ``given``: the tensors of the batch."""
    for parameter in owner.parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return "a parameter has a gradient hook, which only autograd calls"
        if type(parameter) is not nn.Parameter and _is_users_dtensor(parameter):
            return "the parameters are DTensors, whose gradients are exchanged while autograd runs"
    for value in given:
        if value.requires_grad and not value.is_leaf:
            return "an input comes from a computation that needs its gradient"
    for module in owner.modules() if first else ():
        if inside_ddp(module) is not None:
            return (
                "DistributedDataParallel exchanges gradients while autograd runs; the model inside of it, with "
                "parallel=DataParallel(), makes one graph"
            )
        if type(module).__module__.startswith(("torch.nn.parallel", "torch.distributed")):
            return f"{type(module).__name__} exchanges gradients while autograd runs"
    return None


def is_exchanged_by_autograd(owner: Owner) -> bool:
    """Whether a wrapper of the user's exchanges gradients: its hooks need autograd, and nothing is lost by it."""
    return inside_ddp(owner.model) is not None or any(map(_is_users_dtensor, owner.parameters()))


def has_own_gradients(owner: Owner) -> bool:
    """Whether a wrapper of the user's makes the gradients, in the dtype of the parameters."""
    wrappers = ("torch.nn.parallel", "torch.distributed")
    return is_exchanged_by_autograd(owner) or any(type(m).__module__.startswith(wrappers) for m in owner.modules())


def _is_users_dtensor(parameter: Tensor) -> bool:
    """Whether the user sharded the parameter; what ``parallel=Sharded()`` divides is exchanged inside the graph."""
    return is_dtensor(parameter) and not is_divided(parameter)


def _cause(error: Exception) -> BaseException:
    cause: BaseException = error.__cause__ or error
    return getattr(cause, "inner_exception", None) or cause


def reason_of(error: Exception, args: Any, kwargs: Any, targets: Any) -> str:
    """Return the line of an error that says what stopped the capture.

    The batch is searched for Python floats, whose changes may have caused it.
    """
    if RECOMPILE_LIMIT_REACHED in str(error):
        given = {**{f"argument {i}": v for i, v in enumerate(args)}, **kwargs, "targets": targets}
        numbers = [name for name, v in given.items() if any(type(x) is float for x in pytree.tree_leaves(v))]
        return RECOMPILE_LIMIT_REACHED + (f" (Python floats are in: {', '.join(numbers)})" if numbers else "")
    cause = _cause(error)
    reason = Reason(str(cause))
    text = f"{reason}{remedy(reason)}"
    return text if type(cause).__name__ in ("CaptureError", "Unsupported") else f"{type(cause).__name__}: {text}"


def located(reason: str, breaks: Sequence[str]) -> str:
    """Return the graph break that ``reason`` is, with the place in the user's code; ``reason`` itself if none is.

    ``breaks``: those of the pieces, as a report has them. A capture that must be one graph fails without a place if it
    fails at its end: for a computed tensor with ``requires_grad_()``, and for a value that Python asks for
    (``UserError``).
    """
    found = [text.removeprefix(_BREAK) for text in breaks if text.startswith(_BREAK)]
    for what in found:
        if reason.startswith(what.split(" (")[0]) or (_MARK in reason and _MARK in what):
            return what
    return found[0] if found and reason.startswith("UserError") else reason


def is_ours(error: Exception) -> bool:
    """True for a bug in this package, as opposed to a model that cannot be one graph."""
    mistakes = (PipelineError, VerifyError, AttributeError, KeyError, IndexError, NameError, SyntaxError)
    return isinstance(error, mistakes) or isinstance(_cause(error), mistakes)


def users_mistake(function: Callable[..., Any], given: Sequence[Any], owner: Owner, device: torch.device) -> Any:
    """Return the exception that plain PyTorch raises for a batch that could not be traced; None if it raises none.

    A mismatched shape fails inside Dynamo, on fake tensors and with Dynamo's message. Without Dynamo the same code
    raises the error that the user knows, which points to the user's line. The state of the run is not changed.
    """
    args, kwargs, targets = given
    batch = Batch(args, kwargs, targets).copy()
    try:
        with undisturbed(owner, device), torch.enable_grad():
            function(*batch)
    except Exception as error:
        return error
    return None
