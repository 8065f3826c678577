"""The kinds of rules that set the precision of a node, each with the words that a user reads."""

from __future__ import annotations

import enum


class Rule(enum.StrEnum):
    """The kind of rule behind a decision. Its value appears in reports and files; ``words`` says who or what decided.

    >>> Rule.WHITE_LIST == "white_list", Rule.WHITE_LIST.words
    (True, 'your white list')
    """

    words: str

    def __new__(cls, value: str, words: str) -> Rule:
        made = str.__new__(cls, value)
        made._value_ = value
        made.words = words
        return made

    # what the user's policy says
    TABLE = "table", "the op table"
    WHITE_LIST = "white_list", "your white list"
    BLACK_LIST = "black_list", "your black list"
    FOLLOW_LIST = "follow_list", "your follow list"
    UNLISTED = "unlisted", "no rule: the op is not listed"
    CONDITIONAL = "conditional", "a conditional rule of the policy"
    MODULE_RULE = "module_rule", "a module rule of the policy"
    CALL_RULE = "call_rule", "a rule of the policy for this op of the module"
    SET_PRECISION = "set_precision", "set_precision"
    LEVEL = "level", "the level"
    AUTOCAST = "autocast", "torch.autocast's lists"

    # what the model's code says
    REGION = "region", "a precision scope or an autocast region in the model's code"
    AUTHOR = "author", "the model's code"
    FOLLOWS = "follows", "the model's code, which uses the dtype of another tensor"
    ASKED = "asked", "the model's code, which asked for fp32"
    EXPLICIT_DTYPE = "explicit_dtype", "an explicit dtype= argument"
    ALREADY_LOW = "already_low", "the model's own code"
    UNSURE = "unsure", "code that branches on the dtype"
    CREATION = "creation", "the op creates a tensor"

    # what the values allow
    CONSTANT = "constant", "a constant that the low-precision dtype cannot represent"
    NEUTRAL = "neutral", "computed from constants only"
    WIDE = "wide", "reads a value that is kept in fp32"
    STATE = "state", "a value that is kept between calls"
    IN_PLACE = "in_place", "the tensor that it writes to in place"
    VIEW = "view", "a view of a tensor that is written to in place"
    UNTOUCHED = "untouched", "an input whose dtype is never changed"
    NO_FLOAT = "no_float", "no floating-point input"
    INPUT = "input", "the dtype of its input"
    FP32_INSIDE = "fp32_inside", "the op table: fp32 inside the kernel"
    FP32_ONLY = "fp32_only", "torch has no low-precision kernel for it"
    STORED_LOW = "stored_low", "a weight that the conversion stores in low precision"

    # what the device says
    PLACED = "placed", "the costs of ops and casts on the device"

    # nodes that contain others, or that passes add
    SELECTED = "getitem", "the op whose output it is"
    TRANSPARENT = "transparent", "the ops inside it"
    SEALED = "sealed", "a higher-order op, whose inputs and outputs keep their dtypes"
    OPAQUE = "opaque", "a custom autograd function, which keeps its dtypes"
    NATIVE = "native", "a custom autograd function, whose backward keeps its dtypes"
    INSERTED = "inserted", "the pass insert_casts"
    ADDED = "added", "a pass of the compiler"


def words_for(rule: str) -> str:
    """Return the words of a rule by its value; the value itself if it comes from a newer release."""
    return next((known.words for known in Rule if known == rule), rule)
