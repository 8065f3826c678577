"""Rules for single ops: the precision of the calls of one op in one module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..common.errors import PolicyError
from .dtypes import dtype_name, precision_dtype
from .ops.names import canonical


@dataclass(frozen=True, slots=True)
class CallRule:
    """The precision of the calls of one op in one module.

    Args:
        module: The path of the module whose own code calls the op, as in ``named_modules()``; ``""`` is the model.
        op: The op, as in the lists of a policy.
        precision: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        number: Which of the module's calls of this op, counted from 0 in the order in which they run. None stands for
            all of them.
        reason: Why, for the person who reads a report or the policy's file.
        yields: True if the rule gives way where the model's code itself casts the op's inputs to fp32, as the
            low-precision rules of a calibration do.

    Examples:
        >>> from amp_compiler import CallRule, Policy
        >>> rule = CallRule("encoder.0", "add", "float32", number=1, reason="reaches 1.2e6; fp16 holds 65504")
        >>> print(rule)
        encoder.0:add#1
        >>> Policy("O3").with_calls([rule]).call_rule("encoder.0", "add", 1).precision
        'float32'
    """

    module: str
    op: str
    precision: str = "float32"
    number: int | None = None
    reason: str = ""
    yields: bool = False

    def __post_init__(self) -> None:
        for name in ("module", "reason"):
            if not isinstance(getattr(self, name), str):
                raise PolicyError(f"The {name} of a call rule must be a text, not {getattr(self, name)!r}.")
        if self.number is not None and (type(self.number) is not int or self.number < 0):
            raise PolicyError(f"The number of a call rule must be 0, 1, 2 … or left out, not {self.number!r}.")
        if type(self.yields) is not bool:
            raise PolicyError(f"yields of a call rule must be true or false, not {self.yields!r}.")
        object.__setattr__(self, "op", canonical(self.op))
        object.__setattr__(self, "precision", dtype_name(precision_dtype(self.precision)))

    def __str__(self) -> str:
        return call_name(self.module, self.op, self.number)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a policy file; those that say nothing are left out."""
        fields = {"module": self.module, "op": self.op, "number": self.number, "precision": self.precision}
        told = {"reason": self.reason or None, "yields": self.yields or None}
        return {key: value for key, value in {**fields, **told}.items() if value is not None}


#: the fields of a rule in a policy file, and those that must be there
FIELDS, REQUIRED = ("module", "op", "number", "precision", "reason", "yields"), ("module", "op", "precision")


def call_name(module: str, op: str, number: int | None = None) -> str:
    """Return how a call is named in reports: ``encoder.0:add#1``."""
    return f"{module}:{op}" + ("" if number is None else f"#{number}")


def check_rules(rules: Any) -> tuple[CallRule, ...]:
    """Return ``rules``, the newest for each call alone; raise for anything that is not a rule."""
    if isinstance(rules, (CallRule, str, Mapping)) or not isinstance(rules, Iterable):
        raise PolicyError(f"Call rules are a list of amp_compiler.CallRule, not {rules!r}.")
    found: dict[tuple[str, str, int | None], CallRule] = {}
    for rule in rules:
        if not isinstance(rule, CallRule):
            raise PolicyError(f"A call rule is an amp_compiler.CallRule, not {rule!r}.")
        key = rule.module, rule.op, rule.number
        found.pop(key, None)
        found[key] = rule
    return tuple(found.values())
