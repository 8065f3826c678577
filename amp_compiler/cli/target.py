"""TARGET and --input: a model and inputs to call it with."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..common.errors import ArgumentError
from ..common.messages import raised_at
from ..conversion.converted import ConvertedModel
from ..conversion.loading import load_any

DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool, "complex64": torch.complex64,
}  # fmt: skip
_FORMS = "8x3x224x224, 8x128:int64, 2x16:int64:1000, mask=2x16:bool"


@dataclass
class Loaded:
    """What a TARGET names: a model with example inputs, or a saved program."""

    model: nn.Module | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None
    program: torch.export.ExportedProgram | None = None
    converted: ConvertedModel | None = None


def load(target: str, inputs: Sequence[str] = (), *, needs_inputs: bool = True) -> Loaded:
    """Load the model that a TARGET names, with the inputs from --input or those that it returns itself. They must be
    there if ``needs_inputs``."""
    if target.endswith(".pt2") or (":" not in target and os.path.isfile(target)):
        if inputs:
            raise ArgumentError("A saved program contains its example inputs: omit --input.")
        found = load_any(target)
        return Loaded(converted=found) if isinstance(found, ConvertedModel) else Loaded(program=found)
    named = load_attribute(target, "TARGET", "package.module:attr, file.py:attr or a .pt2 file")
    loaded = _model(named, target)
    if inputs:
        args, kwargs, shapes = parse_inputs(inputs)
        return Loaded(loaded.model, args, kwargs, shapes)
    if needs_inputs and not loaded.args and not loaded.kwargs and _takes_inputs(loaded.model):
        dummy = getattr(loaded.model, "dummy_inputs", None)  # the models of transformers have it
        if isinstance(dummy, dict) and dummy:
            return Loaded(loaded.model, (), dict(dummy))
        raise ArgumentError(f"{target} needs example inputs: add --input for each ({_FORMS}), or have it return "
                            "(model, args).")  # fmt: skip
    return loaded


# ------------------------------------------------------------------------------------------- importing


def load_attribute(text: str, what: str = "", forms: str = "package.module:attr or file.py:attr") -> Any:
    """Return what ``file.py:attr`` or ``package.module:attr`` names. ``what``: what an error calls it."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        thing = "a model" if what else "anything"
        raise ArgumentError(f"{what or 'The name'} {text!r} does not name {thing}: write {forms}.")
    module = _import(where)
    named: Any = module
    for part in name.split("."):
        if not hasattr(named, part):
            raise ArgumentError(f"{where} has no attribute {part!r}.{_models(module)}")
        named = getattr(named, part)
    return named


def _import(where: str) -> ModuleType:
    is_file = where.endswith(".py") or os.sep in where
    try:
        if not is_file:
            sys.path.insert(0, os.getcwd())
            return importlib.import_module(where)
        path = Path(where).resolve()
        if not path.is_file():
            raise ArgumentError(f"There is no file {where}.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ArgumentError(f"{where} is not a Python file.")
        sys.path.insert(0, str(path.parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    except ArgumentError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ArgumentError(f"{where} cannot be imported: {raised(error)}") from error


def raised(error: BaseException) -> str:
    """Return the error and the line of the user's code that raised it."""
    text = " ".join(str(error).split())
    at = raised_at(error)
    return f"{type(error).__name__}: {text}{at}" if text else f"{type(error).__name__}{at}"


def _models(module: ModuleType) -> str:
    names = [
        n for n, v in vars(module).items()
        if not n.startswith("_") and (isinstance(v, nn.Module) or getattr(v, "__module__", "") == module.__name__)
    ]  # fmt: skip
    return f" It has {', '.join(names[:6])}." if names else ""


def _model(found: Any, target: str) -> Loaded:
    """Return the model; a class or a function is called to get it."""
    if not isinstance(found, (nn.Module, tuple, list)):
        if not callable(found):
            raise ArgumentError(f"{target} is a {type(found).__name__}: a module, a class or a function is needed.")
        given = [p for p in _parameters(found) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        needed = [p.name for p in given if p.default is p.empty]
        if needed:
            raise ArgumentError(
                f"{target} needs arguments ({', '.join(needed)}): write a function without any that returns the model."
            )
        try:
            found = found()
        except Exception as error:  # the user's code may raise anything
            raise ArgumentError(f"{target}() failed: {raised(error)}") from error
    args: Any = ()
    kwargs: Any = {}
    if isinstance(found, (tuple, list)):
        if not 1 <= len(found) <= 3:
            raise ArgumentError(f"{target} returns {len(found)} values; (model, args, kwargs) are at most three.")
        given = list(found)
        found, args, kwargs = given + [(), {}][len(given) - 1 :]
    found = getattr(found, "original", found) if type(found).__name__ == "AmpModule" else found
    if not isinstance(found, nn.Module):
        raise ArgumentError(f"{target} returns a {type(found).__name__}, not a torch.nn.Module.")
    args = (args,) if isinstance(args, torch.Tensor) else args
    if isinstance(args, dict) and not kwargs:
        args, kwargs = (), args
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs or {}, dict):
        raise ArgumentError(f"{target} must return (model, args, kwargs), with a tuple args and a dict kwargs.")
    return Loaded(found, tuple(args), dict(kwargs or {}))


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return []


def _takes_inputs(model: nn.Module | None) -> bool:
    return bool(_parameters(model.forward)) if model is not None else False


# --------------------------------------------------------------------------------------------- inputs


def parse_inputs(texts: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return (args, kwargs, dynamic shapes or None) for a list of ``--input``; the values are always the same.

    >>> args, kwargs, shapes = parse_inputs(["2x3", "mask=2:bool"])
    >>> args[0].shape, kwargs["mask"].dtype, shapes
    (torch.Size([2, 3]), torch.bool, None)
    """
    generator = torch.Generator().manual_seed(0)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    dynamic: dict[str | int, dict[int, Any]] = {}
    for text in texts:
        name, _, rest = text.rpartition("=")
        value, free = parse_input(rest, generator)
        if name and not name.isidentifier():
            raise ArgumentError(f"--input {text!r}: {name!r} is not an argument name. Forms: {_FORMS}.")
        if not name and kwargs:
            raise ArgumentError(f"--input {text!r}: inputs by name come after those by position.")
        dynamic[name or len(args)] = dict.fromkeys(free, torch.export.Dim.DYNAMIC)
        if name:
            kwargs[name] = value
        else:
            args.append(value)
    if not any(dynamic.values()):
        return tuple(args), kwargs, None
    if kwargs and args:
        raise ArgumentError("Sizes that may change (8*) need all inputs by position, or all by name.")
    shapes: Any = dict(dynamic) if kwargs else tuple(dynamic.values())
    return tuple(args), kwargs, shapes


def parse_input(text: str, generator: torch.Generator) -> tuple[torch.Tensor, list[int]]:
    """Return a tensor for ``SHAPE[:DTYPE[:BELOW]]`` and the dimensions that may change."""
    shape, *rest = text.split(":")
    parts = [p for p in shape.lower().split("x") if p]
    try:
        sizes = [int(p.removesuffix("*")) for p in parts]
        if any(s < 0 for s in sizes) or len(rest) > 2:
            raise ValueError
        below = int(rest[1]) if len(rest) > 1 else 2
        if below < 1:
            raise ValueError
    except ValueError:
        raise ArgumentError(f"--input {text!r} is not SHAPE[:DTYPE[:BELOW]]. Forms: {_FORMS}.") from None
    name = rest[0] if rest else "float32"
    if name not in DTYPES:
        raise ArgumentError(f"--input {text!r}: unknown dtype {name!r}; choose one of {', '.join(DTYPES)}.")
    dtype = DTYPES[name]
    free = [i for i, p in enumerate(parts) if p.endswith("*")]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(sizes, generator=generator).to(dtype), free
    return torch.randint(below, sizes, generator=generator).to(dtype), free
