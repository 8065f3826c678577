"""Advice on graph breaks, chosen by Dynamo's message (in torch 2.13 to 2.15, nothing else says what happened).

Dynamo's text has several lines: the first says what it found, a later one ("Developer debug context") names the
objects. The advice is a line to type, with names from the user's own code where that text has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_LOGGER = re.compile(r"method: <(\w*Logger) (.+?) \(\w+\)>\.(\w+)")
_FUNCTION = re.compile(r"\blogging\.(debug|info|warning|warn|error|exception|critical|log)\(")
#: ``if x.item() > 0``, also behind the place of the line and as a conditional expression
_CONDITION = re.compile(r"\b(?:if|elif|while|assert)\b.*(?:\.item\(\)|\b(?:float|int|bool)\()")
_BRANCH = "the code branches on the value of a tensor; torch.where or torch.cond keeps it in one graph"
_NUMBER = (
    "a number that is used in arithmetic or as a size is captured with "
    "torch._dynamo.config.capture_scalar_outputs = True"
)
_MARKED = (
    "the code, often a hook (enable_input_require_grads() of transformers), calls requires_grad_() on a tensor that "
    "was computed. Training the parameters does not need it: remove the call (disable_input_require_grads()), and "
    "with gradient checkpointing choose use_reentrant=False, which works without it"
)
_IGNORE = "the model logs while it runs; to have Dynamo skip it, call torch._dynamo.config.ignore_logging_functions.add"


class Reason(str):
    """The first line of why a graph ended. ``whole``: Dynamo's complete text. ``source``: the user's line."""

    whole: str
    source: str

    def __new__(cls, whole: str, source: str = "") -> Reason:
        made = super().__new__(cls, next(iter(whole.strip().splitlines()), "").strip())
        made.whole, made.source = whole, source
        return made

    def in_full(self) -> str:
        """With the user's line and what helps."""
        return f"{self} ({self.source}){remedy(self, self.source)}" if self.source else self + remedy(self)


def remedy(reason: str, code: str = "") -> str:
    """Return advice on a graph break, to append to its reason. ``code``: the user's line, if it is known."""
    whole = getattr(reason, "whole", reason)
    return next((f": {advise(whole, code)}" for part, advise in REMEDIES.items() if part in whole), "")


def _ignore_logger(whole: str, code: str) -> str:
    found = _LOGGER.search(whole)
    if found is None:
        return f"{_IGNORE}(logger.warning), with the method that the model calls"
    name = "" if found[1] == "RootLogger" else repr(found[2])
    return f"{_IGNORE}(logging.getLogger({name}).{found[3]})"


def _ignore_function(whole: str, code: str) -> str:
    found = _FUNCTION.search(code)
    if found is None:
        return f"{_IGNORE}(logging.info), with the function that the model calls"
    return f"{_IGNORE}(logging.{found[1]})"


def _item(whole: str, code: str) -> str:
    return _BRANCH if _CONDITION.search(code) else _NUMBER


def _always(text: str) -> Callable[[str, str], str]:
    return lambda whole, code: text


#: a part of Dynamo's message -> the advice
REMEDIES: dict[str, Callable[[str, str], str]] = {
    "Dynamic shape operator": _always(
        "sizes that depend on values (nonzero, masked_select) are captured with "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True"
    ),
    "logging.Logger method": _ignore_logger,
    "LoggingLoggerVariable()": _ignore_function,
    "builtin operator `print`": _always(
        "the model prints while it runs; to have Dynamo print at the end of the graph, call "
        "torch._dynamo.config.reorderable_logging_functions.add(print)"
    ),
    "attempted to reorder a debugging function": _always(
        "only tensors, constants and formatted strings of them can be printed at the end of the graph, and in an "
        "activation checkpoint or torch.cond only constants; take the call out of forward, or print something else"
    ),
    "Unsupported Tensor.item()": _item,
    "generic_jump TensorVariable()": _always(_BRANCH),
    "generic_jump SymNodeVariable()": _always(_BRANCH),
    "Data-dependent branching": _always(_BRANCH),
    "returning intermediate with requires_grad_()": _always(_MARKED),
    "requires_grad_() intermediate leaked": _always(_MARKED),
    "Unsupported Tensor.requires_grad_()": _always(_MARKED),
}
