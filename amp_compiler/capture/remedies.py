"""Advice on graph breaks, chosen by Dynamo's message (in torch 2.13 to 2.15, nothing else says what happened).

Dynamo's text has several lines: the first says what it found, a later one ("Developer debug context") names the
objects. The advice is a line to type, with names from the user's own code where that text has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_LOGGER = re.compile(r"method: <(\w*Logger) (.+?) \(\w+\)>\.(\w+)")
_FUNCTION = re.compile(r"\blogging\.(debug|info|warning|warn|error|exception|critical|log)\(")
_IGNORE = "the model logs while it runs; to have Dynamo skip it, call torch._dynamo.config.ignore_logging_functions.add"


class Reason(str):
    """The first line of the reason why a graph ended. ``whole``: Dynamo's complete text."""

    whole: str

    def __new__(cls, whole: str) -> Reason:
        made = super().__new__(cls, next(iter(whole.strip().splitlines()), "").strip())
        made.whole = whole
        return made


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
    "Unsupported Tensor.item()": _always(
        "a number that is used in arithmetic or as a size is captured with "
        "torch._dynamo.config.capture_scalar_outputs = True"
    ),
    "generic_jump TensorVariable()": _always(
        "the code branches on the value of a tensor; torch.where or torch.cond keeps it in one graph"
    ),
    "Data-dependent branching": _always(
        "the code branches on the value of a tensor; torch.where or torch.cond keeps it in one graph"
    ),
}
