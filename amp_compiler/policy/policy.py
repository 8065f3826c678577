"""``Policy``: an immutable value that says which precision each op, module and region gets.

The policy reads the op table, and ``classify`` returns the class of an op and the reason for it. The pass
``assign_precision`` (``passes/precision/``) turns a class into a dtype for each node of a graph.

Precedence, the first that applies wins:

1. what the model's code says, the innermost first: a ``precision(...)`` scope, a nested ``torch.autocast`` region, a
   module marked by ``set_precision`` (a module called inside a region is inside it; a region in the forward of a
   marked module is inside that module);
2. rules for single calls (``with_calls``), then ``exclude`` and ``with_modules`` rules, the last matching rule first;
   a region wins over the rule of a module around it, and the rule of a module that is called in the region wins over
   the region;
3. conditional rules (op, argument, values);
4. ``white_list`` / ``black_list`` / ``with_ops``;
5. the op table.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..common.errors import ArgumentError, PolicyError
from ..common.files import write_text
from ..common.torch_names import schemas_of
from . import calls, toml
from .calibrated import Measurements, Standing, rules_for
from .calls import CallRule
from .dtypes import check_low_dtype, default_dtype, dtype_name, precision_dtype
from .levels import DEFAULT_LEVEL, LEVELS, Level, check_level
from .ops import torch_lists
from .ops.names import EQUIVALENT, OpLike, canonical, find_row
from .ops.row import OpClass, Row
from .rules import Rule

_LISTS = {OpClass.LOW: Rule.WHITE_LIST, OpClass.FP32: Rule.BLACK_LIST, OpClass.FOLLOW: Rule.FOLLOW_LIST}
DType = torch.dtype  # inside Policy, the name torch is a method


@dataclass(frozen=True, slots=True)
class Conditional:
    """Run ``op`` in fp32 when its argument ``argument`` has one of ``values``."""

    op: str
    argument: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy says about one op: its class, the table's row if there is one, and why."""

    cls: OpClass
    row: Row | None
    reason: str
    rule: Rule


@dataclass(frozen=True)
class Policy:
    """A level, a low-precision dtype, the op table with the user's changes, and rules for modules.

    A policy is an immutable value: every method that changes something returns a new one. ``Policy.default(level,
    dtype)`` is what ``amp_compile(level=..., dtype=...)`` uses; the ``with_...`` methods are the usual way to change
    it.

    Args:
        level: ``"O0"``, ``"O1"``, ``"auto"``, ``"O2"`` or ``"O3"``.
        dtype: ``torch.float16`` or ``torch.bfloat16``. None stands for the default on a CPU, bf16.
        ops: Pairs of an op and its class; see ``with_ops``.
        modules: Pairs of a module path pattern and a precision; see ``with_modules``.
        conditional: Rules that depend on an argument's value; see ``with_conditional``.
        autocast_device: ``"cpu"`` or ``"cuda"`` to reproduce ``torch.autocast`` of that device; see ``Policy.torch``.
        calls: Rules for single ops of a module; see ``with_calls``.

    Examples:
        >>> import torch
        >>> from amp_compiler import Policy
        >>> policy = Policy("O2", torch.bfloat16).with_ops(fp32=["linear"]).with_modules({"head": "float32"})
        >>> policy.classify("linear").cls.value
        'fp32'
        >>> policy.modules
        (('head', 'float32'),)
    """

    level: str = DEFAULT_LEVEL
    dtype: DType | None = None
    ops: tuple[tuple[str, OpClass], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    conditional: tuple[Conditional, ...] = ()
    #: "cpu" or "cuda": reproduce torch.autocast's lists and rules of that device instead of the table
    autocast_device: str | None = None
    calls: tuple[CallRule, ...] = ()

    def __post_init__(self) -> None:
        check_level(self.level)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", check_low_dtype(self.dtype))
        object.__setattr__(self, "ops", tuple(sorted(_classes(self.ops).items())))
        object.__setattr__(self, "modules", tuple(_module_rule(rule) for rule in self.modules))
        object.__setattr__(self, "conditional", tuple(_conditional(rule) for rule in self.conditional))
        object.__setattr__(self, "calls", calls.check_rules(self.calls))
        if self.autocast_device is not None and self.autocast_device not in torch_lists.LISTS:
            raise PolicyError(
                f"torch.autocast's lists are known for {', '.join(torch_lists.LISTS)}, not {self.autocast_device!r}."
            )

    # -------------------------------------------------------------------------------- construction

    @classmethod
    def default(cls, level: str = DEFAULT_LEVEL, dtype: DType | str | None = None, device: Any = "cpu") -> Policy:
        """Return the policy that ``amp_compile`` uses for ``level`` and ``dtype``; without a dtype, the default of
        ``device``.
        """
        check_level(level)
        return cls(level, default_dtype(device) if dtype is None else check_low_dtype(dtype))

    @classmethod
    def torch(cls, device_type: str = "cpu", dtype: DType | str | None = None) -> Policy:
        """Return a policy that reproduces ``torch.autocast(device_type, dtype)``, list for list and rule for rule."""
        low = default_dtype(device_type) if dtype is None else check_low_dtype(dtype)
        return cls("auto", low, autocast_device=device_type)

    @classmethod
    def calibrated(
        cls, calibration: Measurements, level: str = DEFAULT_LEVEL, dtype: DType | str | None = None,
        margin: float = 2.0,
    ) -> Policy:  # fmt: skip
        """Return a policy that fits what ``calibrate`` measured: a rule, with its reason in figures, for each op whose
        values do not fit the low-precision dtype, and for each op of the black list that is harmless in it.

        Args:
            calibration: What ``calibrate`` returned, or ``Calibration.load`` read.
            level: The level for everything else.
            dtype: The low-precision dtype, by default the one that was calibrated for.
            margin: How much larger, or smaller, values of other data may be than those that were measured.
        """
        policy = cls(level, check_low_dtype(getattr(calibration, "dtype", None) if dtype is None else dtype))
        return policy.with_calls(rules_for(calibration, policy.low, margin, policy._standing))

    def _standing(self, op: str) -> Standing:
        choice = self.classify(op)
        return Standing(choice.cls, self.level_row.treatment(choice.cls), choice.row)

    def with_ops(
        self, low: Iterable[OpLike] = (), fp32: Iterable[OpLike] = (), follow: Iterable[OpLike] = ()
    ) -> Policy:
        """Return a policy in which these ops have another class. The newest entry for an op counts.

        Args:
            low: Ops to run in low precision.
            fp32: Ops to run in fp32.
            follow: Ops that the level decides, as it does for other arithmetic.
        """
        lists = (("low", OpClass.LOW, low), ("fp32", OpClass.FP32, fp32), ("follow", OpClass.FOLLOW, follow))
        new = _classes([(op, cls) for what, cls, given in lists for op in _as_list(given, what)])
        return dataclasses.replace(self, ops=tuple({**dict(self.ops), **new}.items()))

    def with_modules(self, rules: Mapping[str, str]) -> Policy:
        """Return a policy with ``rules`` for modules: path patterns and precisions, such as ``{"encoder.*":
        "float32"}``. If several match, the last one counts.
        """
        if not isinstance(rules, Mapping):
            raise PolicyError(f"Module rules are a mapping such as {{'encoder.*': 'float32'}}, not {rules!r}.")
        return dataclasses.replace(self, modules=self.modules + tuple(rules.items()))

    def with_calls(self, rules: Iterable[CallRule]) -> Policy:
        """Return a policy with ``rules`` for single ops of a module. The newest rule for a call counts, and a rule with
        a number wins over one without.
        """
        return dataclasses.replace(self, calls=self.calls + calls.check_rules(rules))

    def with_conditional(self, rules: Iterable[tuple[OpLike, str, Iterable[Any]]]) -> Policy:
        """Return a policy with ``rules`` ``(op, argument, values)``: the op runs in fp32 where the argument has one of
        the values.
        """
        return dataclasses.replace(self, conditional=self.conditional + tuple(_conditional(rule) for rule in rules))

    # ----------------------------------------------------------------------------------- reading

    @property
    def low(self) -> DType:
        """The low-precision dtype."""
        return self.dtype if self.dtype is not None else default_dtype("cpu")

    @property
    def level_row(self) -> Level:
        """What the level does with each class of ops."""
        return LEVELS[self.level]

    @property
    def rewrites(self) -> bool:
        """False if the level leaves everything in fp32."""
        return self.level_row.rewrites

    @property
    def keeps_wide(self) -> bool:
        """True if results of fp32 ops stay fp32 until a white-listed op reads them (``ir/wide.py``)."""
        return self.level_row.keeps_wide and self.autocast_device is None

    @functools.cached_property
    def _overrides(self) -> dict[str, OpClass]:
        return dict(self.ops)

    def classify(self, name: str) -> Choice:
        """Return the class of the op ``name`` (its ATen name, without overload) and the reason for it."""
        row = find_row(name)
        plain = row.name if row is not None else name
        chosen = self._overrides.get(EQUIVALENT.get(plain, plain)) or self._overrides.get(name)
        if chosen is not None:
            rule = _LISTS[chosen]
            return Choice(chosen, row, f"on {rule.words}", rule)
        if row is None:
            reason = f"unlisted: not known to be safe in low precision; white_list=[{name!r}] runs it there"
            return Choice(OpClass.KEEP, None, reason, Rule.UNLISTED)
        return Choice(row.cls, row, row.reason, Rule.TABLE)

    def condition_for(self, name: str, arguments: Mapping[str, Any]) -> Conditional | None:
        """Return the conditional rule that applies to a call of the op ``name`` with these ``arguments``, or None."""
        plain = EQUIVALENT.get(name, name)
        for rule in self.conditional:
            if rule.op in (name, plain) and rule.argument in arguments:
                value = _frozen(arguments[rule.argument])
                if any((type(value) is not bool and value == v) or value is v for v in rule.values):
                    return rule
        return None

    def module_rule(self, path: str) -> tuple[str, DType] | None:
        """Return the pattern and dtype of the last rule that matches the module ``path``, or None."""
        for pattern, precision in reversed(self.modules):
            if matches(pattern, path):
                return pattern, precision_dtype(precision)
        return None

    @functools.cached_property
    def _calls(self) -> dict[tuple[str, str, int | None], CallRule]:
        return {(rule.module, rule.op, rule.number): rule for rule in self.calls}

    def call_rule(self, module: str, op: str, number: int | None) -> CallRule | None:
        """Return the rule for call ``number`` of ``op`` in the code of the module ``module`` (a path), or None."""
        if not self.calls:
            return None
        name = EQUIVALENT.get(op, op)
        return self._calls.get((module, name, number)) or self._calls.get((module, name, None))

    # ------------------------------------------------------------------------------------- files

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to ``path`` as TOML. The file is replaced as a whole or not at all."""
        write_text(path, self.to_toml(), what="The policy", error=PolicyError)

    def to_toml(self) -> str:
        """Return the policy as TOML text."""
        lists = {cls.value: [n for n, c in self.ops if c is cls] for cls in (OpClass.LOW, OpClass.FP32, OpClass.FOLLOW)}
        head = {"level": self.level, "dtype": None if self.dtype is None else dtype_name(self.dtype),
                "autocast_device": self.autocast_device}  # fmt: skip
        modules = [{"pattern": pattern, "precision": precision} for pattern, precision in self.modules]
        rules = [{"op": r.op, "argument": r.argument, "values": list(r.values)} for r in self.conditional]
        single = [rule.to_dict() for rule in self.calls]
        return toml.text(head, lists, {"module": modules, "call": single, "conditional": rules})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy from ``path``, a file that ``to_file`` wrote or a person edited."""
        data = toml.read(path)
        try:
            return cls.from_dict(data)
        except ArgumentError as error:
            raise PolicyError(f"In the policy file {path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """Make a policy from ``data``, parsed TOML. An unknown key is an error that suggests the nearest known one."""
        toml.check_document(data)
        dtype, device = data.get("dtype"), data.get("autocast_device")
        if device is not None and not isinstance(device, str):
            raise PolicyError(f"autocast_device must be a text such as 'cpu', not {device!r}.")
        policy = cls(
            data.get("level", DEFAULT_LEVEL), None if dtype is None else check_low_dtype(dtype), autocast_device=device
        )
        ops = data.get("ops", {})
        if not isinstance(ops, dict):
            raise PolicyError("ops must be a table: write [ops] and below it low, fp32 and follow lists.")
        toml.check_keys("[ops]", ops, ("low", "fp32", "follow"))
        policy = policy.with_ops(**{key: _as_list(value, key) for key, value in ops.items()})
        tables = toml.tables(data, "module", ("pattern", "precision"))
        policy = dataclasses.replace(policy, modules=tuple((t["pattern"], t["precision"]) for t in tables))
        single = toml.tables(data, "call", calls.FIELDS, calls.REQUIRED)
        policy = policy.with_calls(CallRule(**table) for table in single)
        rules = toml.tables(data, "conditional", ("op", "argument", "values"))
        return policy.with_conditional(
            (r["op"], r["argument"], _as_list(r["values"], "values")) for r in rules
        )


# ---------------------------------------------------------------------------------------------- checks


def matches(pattern: str, path: str) -> bool:
    """True if a module path matches a pattern; ``encoder.*`` also matches everything below ``encoder``."""
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern + ".*")


def _as_list(given: object, what: str) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise PolicyError(f"{what} must be a list of ops, not {given!r}: write [{given!r}].")
    return list(given)


def _classes(given: Iterable[tuple[OpLike, OpClass]]) -> dict[str, OpClass]:
    """Return canonical name -> class; raise for an op with two classes, or one that cannot be listed."""
    classes: dict[str, OpClass] = {}
    for op, cls in given:
        if cls not in (OpClass.LOW, OpClass.FP32, OpClass.FOLLOW):
            raise PolicyError(f"{op!r} cannot be listed as {cls!r}: choose the class low, fp32 or follow.")
        name = canonical(op)
        if classes.get(name, cls) is not cls:
            raise PolicyError(
                f"'{name}' is on two lists ({classes[name].value} and {cls.value}): remove it from one of them."
            )
        row = find_row(name)
        if row is not None and row.cls is OpClass.KEEP:
            raise PolicyError(f"'{name}' cannot be given a precision: {row.reason}.")
        classes[name] = cls
    return classes


def _module_rule(rule: Any) -> tuple[str, str]:
    try:
        pattern, precision = rule
    except (TypeError, ValueError):
        raise PolicyError(f"A module rule is (pattern, precision), not {rule!r}.") from None
    if not isinstance(pattern, str) or not pattern:
        raise PolicyError(f"A module rule needs a path pattern such as 'encoder.*', not {pattern!r}.")
    return pattern, dtype_name(precision_dtype(precision))


def _conditional(rule: Any) -> Conditional:
    if isinstance(rule, Conditional):
        rule = (rule.op, rule.argument, rule.values)
    try:
        op, argument, values = rule
        if isinstance(values, str):
            raise TypeError
        frozen = tuple(_frozen(v) for v in values)
    except (TypeError, ValueError):
        raise PolicyError(
            f"A conditional rule is (op, argument, values), such as ('softplus', 'beta', [1]); got {rule!r}."
        ) from None
    name = canonical(op)
    _check_argument(name, argument)
    return Conditional(name, argument, frozen)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


def _check_argument(name: str, argument: str) -> None:
    namespace, _, short = name.rpartition("::")
    schemas = schemas_of(f"{namespace or 'aten'}::{short}")
    known = sorted({a.name for s in schemas for a in s.arguments})
    if schemas and argument not in known:
        raise PolicyError(f"'{name}' has no argument {argument!r}; it has {', '.join(known)}.")
