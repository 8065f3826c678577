"""Dtypes that kernels of CUDA take, where those of CPUs, fakes and ``meta`` do not insist.

They were written down by hand. torch's own meta functions check some of them (``CHECKED_BY_META``). The rules for layer
and group norm agree with excerpts of the kernels' sources (``SEEN_IN_SOURCE``, in ``aten/src/ATen/native/cuda``: both
read weight and bias by the input's type), whose release is not known. The others were compared with nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from amp_compiler import ir

LOW = (torch.float16, torch.bfloat16)
#: op -> the arguments that must have one dtype: the kernel reads them by the first one's type
SAME = {
    "native_layer_norm": (0, 2, 3), "native_layer_norm_backward": (0, 1, 5), "native_group_norm": (0, 1, 2),
    "native_group_norm_backward": (0, 1, 4), "mm": (0, 1), "bmm": (0, 1), "addmm": (0, 1, 2), "baddbmm": (0, 1, 2),
    "convolution": (0, 1, 2), "convolution_backward": (0, 1, 2), "_thnn_fused_lstm_cell": (0, 1, 2),
    "_scaled_dot_product_flash_attention": (0, 1, 2), "_scaled_dot_product_efficient_attention": (0, 1, 2, 3),
    "_scaled_dot_product_cudnn_attention": (0, 1, 2, 3), "_scaled_dot_product_flash_attention_backward": (0, 1, 2, 3),
    "_scaled_dot_product_efficient_attention_backward": (0, 1, 2, 3), "nll_loss_forward": (0, 2),
    "index_put": (0, 2), "index_add": (0, 3), "scatter_add": (0, 3), "dot": (0, 1), "mv": (0, 1),
}  # fmt: skip
#: rules that torch's meta functions have as well: on fakes the op raises (torch 2.13)
CHECKED_BY_META = ("bmm", "baddbmm", "dot", "scatter_add")
CHECKED_BY_SOME_RELEASES = ("native_layer_norm",)  # by that of torch 2.15, not of 2.13
SEEN_IN_SOURCE = {
    "native_layer_norm": "layer_norm_kernel.cu", "native_layer_norm_backward": "layer_norm_kernel.cu",
    "native_group_norm": "group_norm_kernel.cu", "native_group_norm_backward": "group_norm_kernel.cu",
}  # fmt: skip
#: kernels for low precision only
ONLY_LOW = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")
#: input, then what may be fp32 beside a low input, all alike: weight, bias, running statistics
BATCH_NORM = ("_native_batch_norm_legit_functional", "_native_batch_norm_legit", "_batch_norm_with_update_functional",
              "native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")  # fmt: skip


def violations(node: fx.Node, name: str) -> Iterator[str]:
    """What the kernel of a node would refuse on CUDA, in words."""
    op = name.removeprefix("aten::").split(".")[0]

    def dtypes(places: tuple[int, ...]) -> list[torch.dtype]:
        given = [node.args[i] for i in places if i < len(node.args)]
        values = [ir.tensor_of(a) for a in given if isinstance(a, fx.Node)]
        return [v.dtype for v in values if v is not None and v.dtype.is_floating_point]

    found = dtypes(SAME.get(op, ()))
    if len(set(found)) > 1:
        yield f"{op} takes one dtype, not {found}"
    if op in ONLY_LOW and any(d not in LOW for d in found):
        yield f"{op} takes low precision, not {found}"
    if op in BATCH_NORM:
        first, rest = dtypes((0,)), dtypes((1, 2, 3, 4))
        if len(set(rest)) > 1 or any(d not in (first[0], torch.float32) for d in rest):
            yield f"{op} takes parameters of its input's dtype or fp32, not {first} with {rest}"
