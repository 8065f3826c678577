"""Check the file of a converted model before torch reads it.

torch's reader can run code from a file: it unpickles tensors that are marked so and inputs that it cannot read safely,
it looks up any Python function that a node names (``torch.os.system``), evaluates size expressions, and writes guards
and names into source text. Each of these is restricted to what ``save`` writes.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from ..common.errors import AmpError
from ..common.torch_names import HigherOrderOperator, OpOverloadPacket


class Unsafe(AmpError):
    """Something in a file that ``save`` does not write and that could run code."""


#: folders and files below the root of an archive
_MEMBERS = re.compile(
    r"(archive_format|archive_version|byteorder|version|\.data/[\w.]+|\.format_version|\.storage_alignment"
    r"|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|extra/[\w.]+)"
)
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_PATH = re.compile(r"[\w.\-/ :]*")
_SYMBOL = re.compile(r"[a-z]+\d+")
_OP = re.compile(r"torch\.ops\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)(\.[A-Za-z_]\w*)?")
#: Python functions that a traced graph may call, in addition to ops
_FUNCTIONS = frozenset({
    *(f"_operator.{n}" for n in ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos",
                                 "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_", "lshift", "rshift")),
    *(f"torch.{n}" for n in ("sym_int", "sym_float", "sym_not", "sym_max", "sym_min", "sym_ite", "sym_sqrt", "sym_sum",
                             "_sym_sqrt", "_sym_cos", "_sym_sin", "_sym_log2")),
    *(f"math.{n}" for n in ("ceil", "floor", "trunc", "sqrt", "pow", "log2")),
})  # fmt: skip
#: functions of size expressions
_SYMPY = frozenset({
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv",
    "LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt",
    "RoundToInt", "RoundDecimal", "ToFloat", "Identity", "IsNonOverlappingAndDenseIndicator", "Max", "Min", "Eq", "Ne",
    "Le", "Lt", "Ge", "Gt", "And", "Or", "Not", "Abs", "Piecewise", "oo", "int_oo", "True", "False",
    "Symbol", "Integer", "Rational", "Float", "Mul", "Add", "Pow", "true", "false", "Unequality", "Equality",
    "LessThan", "StrictLessThan", "GreaterThan", "StrictGreaterThan",
})  # fmt: skip
_ARITHMETIC = (
    ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Constant, ast.Load,
    ast.operator, ast.boolop, ast.unaryop, ast.cmpop, ast.Tuple,
)  # fmt: skip
_GUARD_METHODS = ("size", "stride", "storage_offset", "item", "floor", "ceil", "trunc")


def check_members(archive: zipfile.ZipFile, wanted: tuple[str, ...]) -> dict[str, str]:
    """Raise for an archive with unknown members or pickled tensors; return the ``wanted`` texts."""
    if min((member.header_offset for member in archive.infolist()), default=1) != 0 or archive.comment:
        raise zipfile.BadZipFile("its list of members does not belong to it")
    names = archive.namelist()
    roots = {name.split("/", 1)[0] for name in names}
    if len(roots) > 1 or len(set(names)) != len(names):
        raise Unsafe("it has two roots, or two members of one name")
    inner = {name.split("/", 1)[1]: name for name in names if "/" in name}
    for name in inner:
        if not _MEMBERS.fullmatch(name):
            raise Unsafe(f"it has a member '{name}', which save does not write")
    for config in _CONFIGS:
        if config in inner:
            for path, entry in json.loads(archive.read(inner[config])).get("config", {}).items():
                stored = str(entry.get("path_name", ""))
                if entry.get("use_pickle") or not re.fullmatch(r"(weight|tensor)_\d+", stored):
                    raise Unsafe(f"'{path}' would have to be unpickled")
    return {name: archive.read(inner[f"extra/{name}"]).decode() for name in wanted if f"extra/{name}" in inner}


def check_program(text: str | bytes) -> None:
    """Raise for the JSON of a graph that names anything but ops, or that has code in a name or an expression."""
    program = json.loads(text)
    for key, value in _strings(program):
        if key == "target" and not _is_op(value) and not _PATH.fullmatch(value):
            raise Unsafe(f"a node calls {value!r}")
        if key == "expr_str":
            _check_expression(value)
        elif key in ("name", "as_name"):
            if value and not _IDENTIFIER.fullmatch(value):
                raise Unsafe(f"{value!r} is not the name of a value")
        elif key.endswith("_name") and not _PATH.fullmatch(value):
            raise Unsafe(f"{value!r} is not the path of a weight")
    for node in _nodes(program):
        if not _is_op(str(node.get("target", ""))):
            raise Unsafe(f"a node calls {node.get('target')!r}, which is not an op of torch or an imported package")
    for guard in program.get("guards_code", ()):
        _check_guard(str(guard))
    for entry in program.get("graph_module", {}).get("module_call_graph", ()):
        for key in ("in_spec", "out_spec"):
            spec = (entry.get("signature") or {}).get(key)
            if spec and any(not _PATH.fullmatch(text) for text in _keys(json.loads(spec))):
                raise Unsafe("a key of its inputs or outputs holds quotes or brackets")


def _is_op(target: str) -> bool:
    found = _OP.fullmatch(target)
    if not found:
        return target in _FUNCTIONS
    if found[1] in dir(type(torch.ops)) or found[1].startswith("__"):
        return False
    op = getattr(getattr(torch.ops, found[1]), found[2], None)
    if found[3] is None:
        return isinstance(op, HigherOrderOperator)
    return isinstance(op, OpOverloadPacket) and found[3][1:] in op.overloads()


def _check_expression(text: str) -> None:
    """Check a size as sympy writes it: ``Mul(Integer(2), Symbol('s77', positive=True, integer=True))``."""
    for node in _parsed(text, "no size"):
        fine = isinstance(node, (*_ARITHMETIC, ast.Call, ast.keyword))
        if isinstance(node, ast.Name):
            fine = node.id in _SYMPY or _SYMBOL.fullmatch(node.id) is not None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            fine = _SYMBOL.fullmatch(node.value) is not None
        if not fine:
            raise Unsafe(f"{text!r} is not a size")


def _check_guard(text: str) -> None:
    """Check a condition as torch writes it: ``L['x'].size()[0] > 4``."""
    for node in _parsed(text, "no condition"):
        fine = isinstance(node, (*_ARITHMETIC, ast.Call))
        if isinstance(node, ast.Name):
            fine = node.id in ("L", "math", "max", "min", "abs", "inf") or node.id in _SYMPY
        elif isinstance(node, ast.Attribute):
            fine = node.attr in _GUARD_METHODS
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            fine = _PATH.fullmatch(node.value) is not None
        if not fine:
            raise Unsafe(f"{text!r} is not a condition on sizes")


def _parsed(text: str, otherwise: str) -> Iterator[ast.AST]:
    try:
        yield from ast.walk(ast.parse(text, mode="eval"))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Unsafe(f"{text!r} is {otherwise}") from error


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) for every text in parsed JSON, except descriptions of nodes."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in ("metadata", "nodes"):
                yield from _strings(item, str(name))
            elif name == "nodes":
                for node in item:
                    yield from _strings({k: v for k, v in node.items() if k not in ("metadata", "target")})
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, key)
    elif isinstance(value, str):
        yield key, value


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every node of every graph, including those inside higher-order ops."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "nodes" and isinstance(item, list):
                yield from item
            yield from _nodes(item)
    elif isinstance(value, list):
        for item in value:
            yield from _nodes(item)


def _keys(value: Any) -> Iterator[str]:
    """Yield every text in a tree's description that is not a class name; its context is JSON inside JSON."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "context" and isinstance(item, str):
                try:
                    yield from _keys(json.loads(item))
                except ValueError:
                    yield item
            elif name != "type":
                yield from _keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)
    elif isinstance(value, str):
        yield value
