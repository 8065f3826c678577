"""Which precision each op, module and region gets: levels, the op table (``ops/``), users' rules, scopes."""

from .dtypes import DTYPES, check_low_dtype, default_dtype, dtype_name, precision_dtype
from .levels import LEVELS, check_level
from .policy import FILE_VERSION, Choice, Conditional, DType, Policy, matches

__all__ = [
    "DTYPES",
    "FILE_VERSION",
    "LEVELS",
    "Choice",
    "Conditional",
    "DType",
    "Policy",
    "check_level",
    "check_low_dtype",
    "default_dtype",
    "dtype_name",
    "matches",
    "precision_dtype",
]
