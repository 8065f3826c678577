"""What Inductor has to be told about a graph that our passes have rewritten.

Inductor compiles the ops that it knows, and calls all others as they are, in the layout that was traced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .. import ir
from ..kernels.wide import FORMS

aten = torch.ops.aten
_CONVOLUTION, _BACKWARD = FORMS[aten.convolution.default], FORMS[aten.convolution_backward.default]
_CAST = torch.ops.prims.convert_element_type.default


def prepare(graph: fx.Graph, inference: bool) -> None:
    """Write the ops of our passes as ops that Inductor has code for. ``inference``: the graph has no backward, here or
    in another graph."""
    if inference:
        _open_convolutions(graph)
    elif {_CONVOLUTION, _BACKWARD} <= {node.target for node in graph.nodes}:
        _lay_out_images(graph)  # not in one half of a step: what it hands to the other half has the traced strides
    _decompose_casts(graph)


def keep_strides(graph: fx.Graph) -> None:
    """Have every result returned with the strides that were traced: another graph was compiled to read it with them.
    Inductor's own callers ask for it by the same entry (torch 2.13)."""
    last = next(iter(reversed(graph.nodes)))
    results: Any = last.args[0]  # with their Nones: Inductor counts these
    last.meta["user_visible_output_idxs"] = [i for i, node in enumerate(results) if isinstance(node, fx.Node)]


def _open_convolutions(graph: fx.Graph) -> None:
    """Replace ``amp::wide_convolution`` by what it stands for: torch's convolution in fp32 between casts.

    Inductor then chooses the layout, in which oneDNN's convolutions are faster, and its loops before and after them
    widen and round. This is for graphs without a backward: the same loops would write what the backward reads in fp32
    as well, and hold it until then (a small ResNet's step took 1.8 times the memory, more than in fp32).
    """
    widened: dict[fx.Node, fx.Node] = {}

    def wide(node: fx.Node) -> fx.Node:
        if node not in widened:
            widened[node] = _cast(graph, node, torch.float32)
        return widened[node]

    for node in list(graph.nodes):
        if node.target is not _CONVOLUTION:
            continue
        value = node.meta["val"]
        with graph.inserting_before(node):
            node.args = fx.map_arg(node.args, wide)
            node.kwargs = fx.map_arg(node.kwargs, wide)
        node.target, node.meta["val"] = aten.convolution.default, ir.retype(value, torch.float32)
        readers = list(node.users)
        with graph.inserting_after(node):
            rounded = _cast(graph, node, value.dtype)
        for reader in readers:
            reader.replace_input_with(node, rounded)


def _lay_out_images(graph: fx.Graph) -> None:
    """Have ``amp::wide_convolution`` and its backward read images in channels-last order.

    oneDNN's convolutions are faster in it, and Inductor would choose it for torch's convolutions. For other ops it
    keeps the strides that ``node.meta["eager_input_vals"]`` has (torch 2.13), and has the loops before write them.
    """
    for node in graph.nodes:
        if node.target not in (_CONVOLUTION, _BACKWARD):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        number = 1 if node.target is _CONVOLUTION else 2  # images, or the results' gradient and the images
        if args[0].dim() == 4:
            images = [torch.empty_like(value, memory_format=torch.channels_last) for value in args[:number]]
            node.meta["eager_input_vals"] = (*images, *args[number:]), kwargs


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    value = ir.tensor_of(node)
    if value is None or value.dtype == dtype:
        return node
    new = graph.call_function(_CAST, (node, dtype))
    new.meta = {**node.meta, "val": ir.retype(value, dtype)}
    return new


def _decompose_casts(graph: fx.Graph) -> None:
    """Decompose ``_to_copy``, which passes insert as casts. Inductor decomposes it while it traces a graph and has no
    code for it, but these passes run later (torch 2.13 fails with "both a fallback and a decomp")."""
    for node in graph.nodes:
        if node.target is aten._to_copy.default and ir.is_cast(node):
            node.args = (ir.cast_source(node), ir.cast_dtype(node))
            node.kwargs = {}
            node.target = _CAST


# --------------------------------------------------------------------------------------------- code of its own


@contextlib.contextmanager
def generating() -> Iterator[None]:
    """Around every compilation of one of our graphs by Inductor.

    Its cache of compiled graphs does not know of what this file does besides changing the graph, so the key gets a mark
    of the file: after an update, code that an earlier version made is not used. Nor does it know the CPU (torch 2.13):
    loops that were written for vectors of 16 numbers leave out every second one where vectors have 8.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # not needed, and not loaded, with the eager backend

    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} {_version()} {pick_vec_isa()}".strip()
    with config.patch(cache_key_tag=tag), rounding_in_registers():
        yield


@functools.cache
def _version() -> str:
    return "amp_compiler " + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------- its C++ loops

#: rounds a vector of fp32 numbers to bf16, to the nearest and to even, and leaves them fp32; NaN becomes the NaN that
#: torch's conversion returns
_ROUND = """[&]
{{
    typedef uint32_t bits __attribute__((vector_size(sizeof(at::vec::Vectorized<float>))));
    typedef float numbers __attribute__((vector_size(sizeof(at::vec::Vectorized<float>))));
    auto rounded = {value};
    auto parts = reinterpret_cast<char*>(&rounded);
    #pragma GCC unroll 4
    for (size_t part = 0; part < sizeof(rounded); part += sizeof(bits))
    {{
        bits x;
        std::memcpy(&x, parts + part, sizeof(x));
        x = (numbers)x == (numbers)x ? (x + 0x7fffu + ((x >> 16) & 1u)) & 0xffff0000u : bits{{}} + 0xffff0000u;
        std::memcpy(parts + part, &x, sizeof(x));
    }}
    return rounded;
}}
()"""


_HERE = threading.local()
_INSTALLING = threading.Lock()


@contextlib.contextmanager
def rounding_in_registers() -> Iterator[None]:
    """Inside the block, the vectorized loops that Inductor writes in this thread round an fp32 value to bf16 without
    packing and unpacking it.

    The loops compute a bf16 op in fp32 and round its result, as eager does. Without bf16 instructions, the conversion
    to bf16 takes ten instructions and that back to fp32 three more; rounding alone takes seven (a Llama-like model's
    loops took a quarter less time). The values are the same in every bit.
    """
    _install()
    before, _HERE.rounds = getattr(_HERE, "rounds", False), True
    try:
        yield
    finally:
        _HERE.rounds = before


def _install() -> None:
    """Have Inductor ask us how to write a conversion.

    torch 2.13 internals: ``CppVecKernel.get_to_dtype_expr`` writes one, and ``cse`` has the variable that holds its
    result; there is no setting for this. It is replaced for good, and behaves as before outside of the blocks above:
    ``patching.replaced`` would have one thread wait for another that compiles, while it holds Dynamo's lock.
    """
    from torch._inductor.codegen.cpp import CppVecKernel

    with _INSTALLING:
        write: Any = CppVecKernel.get_to_dtype_expr
        if getattr(write, "rounds_in_registers", False):
            return

        @functools.wraps(write)
        def expression(self: Any, src: Any, dtype: torch.dtype, src_dtype: torch.dtype, *rest: Any, **kw: Any) -> Any:
            text = write(self, src, dtype, src_dtype, *rest, **kw)
            if not getattr(_HERE, "rounds", False) or not src.is_vec:
                return text
            conversions = self.__dict__.setdefault("_amp_conversions", {})
            if (src_dtype, dtype) == (torch.float32, torch.bfloat16):
                conversions[text] = src
            elif (src_dtype, dtype) == (torch.bfloat16, torch.float32):
                for conversion, value in conversions.items():
                    if self.cse.try_get(conversion) is src:
                        return _ROUND.format(value=value)
            return text

        expression.rounds_in_registers = True  # type: ignore[attr-defined]
        CppVecKernel.get_to_dtype_expr = expression  # type: ignore[method-assign]
