"""The origin of the nodes of a captured graph: module paths, and the names by which users know the inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir

#: the class of a compiled function inside of the model: a module for torch, but not one of the model's modules
COMPILED_FUNCTION = "AmpFunction"


def _class_name(cls: Any) -> str:
    """Return the plain name of a class that a tracer gives as a class or as text."""
    return str(getattr(cls, "__qualname__", cls)).rpartition(".")[2]


def annotate_origin(
    gm: fx.GraphModule, modules: Mapping[int, str], inside: tuple[str, type] | None = None
) -> None:
    """Write each node's module stack, with paths as in ``named_modules`` and ``inside`` at its bottom."""
    cache: dict[int, list[tuple[str, Any]]] = {}
    bottom = [] if inside is None else [inside]
    for node in gm.graph.nodes:
        raw = node.meta.get("nn_module_stack")
        if not raw:
            if bottom and node.op == "call_function":
                node.meta["amp_module_stack"] = bottom
            continue
        if id(raw) not in cache:
            kept = [(key, name, cls) for key, (name, cls) in raw.items() if _class_name(cls) != COMPILED_FUNCTION]
            cache[id(raw)] = bottom + [(_path(key, name, modules), cls) for key, name, cls in kept]
        node.meta["amp_module_stack"] = cache[id(raw)]


_INDEX = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")
_ROOT = re.compile(r"^(L|G)\[['\"][^'\"]+['\"]\]\.?|^L__self__\.?|^L\.")


def _path(key: Any, name: str, modules: Mapping[int, str]) -> str:
    digits = str(key).split("@")[0]
    if digits.isdigit() and int(digits) in modules:
        return modules[int(digits)]
    clean = _ROOT.sub("", name)
    clean = re.sub(r"\._(modules|parameters|buffers)(?=\[|\.)", "", clean)
    clean = re.sub(r"^_(modules|parameters|buffers)(?=\[|\.)", "", clean)
    return _INDEX.sub(r".\1", clean).lstrip(".")


def mark_parameters(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Mark the inputs that are leaves and need a gradient: their traced values are detached and don't show it."""
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, value in zip(places, example_inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
            node.meta[ir.PARAMETER] = True
        elif "_buffers[" in _source_text(node) and holds_large_values(value):
            node.meta[ir.CONSTANT] = value  # a registered mask, too large for fp16


def holds_large_values(value: Any) -> bool:
    """True if a buffer holds finite values that are too large for fp16, as a mask of -1e9 does."""
    plain = type(value) is torch.Tensor and value.dtype is torch.float32 and value.layout is torch.strided
    if not plain or not 0 < value.numel() <= 1 << 20:
        return False
    finite = value.detach()[value.isfinite()].abs()
    return bool(finite.numel()) and float(finite.max()) > torch.finfo(torch.float16).max


def name_inputs(source: fx.GraphModule, lowered: fx.GraphModule) -> None:
    """Give placeholders the names that the user knows: ``encoder_0_weight`` instead of ``arg3_1``."""
    olds = [n for n in source.graph.nodes if n.op == "placeholder"]
    news = [n for n in lowered.graph.nodes if n.op == "placeholder"]
    for old, new in zip(olds, news, strict=True):
        origin = getattr(old, "_dynamo_source", None)
        if origin is not None:
            new._dynamo_source = origin
        for key in ("tensor_dict", "grapharg"):
            if key in old.meta:
                new.meta[key] = old.meta[key]
        new._rename(_input_name(_source_text(old)) or str(old.target))


def _source_text(node: fx.Node) -> str:
    """Return the source of an input of the graph as Dynamo writes it, such as ``L['self']._parameters['weight']``."""
    origin = getattr(node, "_dynamo_source", None)
    text = origin.name if origin is not None else str(node.target)
    return text() if callable(text) else str(text)


def _input_name(source: str) -> str:
    """Return ``x`` for ``L['x']``, ``args_0`` for ``L['args'][0]``, ``encoder_0_weight`` for a parameter's source."""
    if re.search(r"_(parameters|buffers)\[", source):
        path = _path("", source, {})
        name = re.sub(r"\W+", "_", path).strip("_")
        return f"model_{name}" if name[:1].isdigit() else name
    name = re.sub(r"\W+", "_", re.sub(r"^[LG](?=\[)", "", source)).strip("_")
    return name
