"""The precision of each op, module and region: levels, the op table (``ops/``), users' rules, scopes."""

from .calls import CallRule, call_name
from .dtypes import DTYPES, check_low_dtype, default_dtype, dtype_name, precision_dtype
from .levels import DEFAULT_LEVEL, LEVELS, Level, Treatment, check_level
from .policy import Choice, Conditional, DType, Policy, matches
from .rules import Rule, words_for

__all__ = [
    "DEFAULT_LEVEL",
    "DTYPES",
    "LEVELS",
    "CallRule",
    "Choice",
    "Conditional",
    "DType",
    "Level",
    "Policy",
    "Rule",
    "Treatment",
    "call_name",
    "check_level",
    "check_low_dtype",
    "default_dtype",
    "dtype_name",
    "matches",
    "precision_dtype",
    "words_for",
]
