"""The op table: complete, consistent, and true where a row claims something that can be run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_compiler.policy.ops.row import OpClass, Row
from amp_compiler.policy.ops.table import ALIASES, ALL_ROWS, ROWS

aten: Any = torch.ops.aten
LOW_DTYPES = [torch.bfloat16, torch.float16]
ROW = {row.name: row for row in ROWS}

# Every op that a peer's list speaks of. "to" is a cast: casts are the compiler's own business.
PEER_OPS = (Path(__file__).parent / "peer_ops.txt").read_text().split()
CASTS = {"to", "_to_copy", "type_as"}


def argument_names(name: str) -> set[str]:
    packet = getattr(aten, name)
    return {a.name for overload in packet.overloads() for a in getattr(packet, overload)._schema.arguments}


# --- completeness and consistency ---------------------------------------------------------------------


def test_every_op_of_the_peers_has_a_row_or_an_alias() -> None:
    assert len(PEER_OPS) == len(set(PEER_OPS)) == 422
    assert sorted(set(PEER_OPS) - {row.name for row in ALL_ROWS} - set(ALIASES)) == ["to"]


def test_names_are_unique() -> None:
    assert len({row.name for row in ALL_ROWS}) == len(ALL_ROWS)
    assert len(ROW) == len(ROWS)
    assert not set(ROW) & set(ALIASES)


def test_casts_have_no_row() -> None:
    assert not CASTS & (set(ROW) | set(ALIASES))


@pytest.mark.parametrize("names", [ROW, ALIASES], ids=["rows", "aliases"])
def test_every_name_is_an_aten_op(names: dict[str, object]) -> None:
    """Or one of ours."""
    assert [name for name in names if not hasattr(aten, name) and not name.startswith("amp::")] == []


def test_aliases_lead_to_rows() -> None:
    assert {target for target in ALIASES.values() if target not in ROW} == set()


def test_in_place_forms_share_the_row_of_the_plain_op() -> None:
    names = [*ROW, *ALIASES]
    assert [name for name in names if name.endswith("_") and not name.endswith("__")] == []


def test_every_reason_is_a_phrase() -> None:
    """It stands alone in a report or behind a colon: no capital, no full stop, and short enough to be read."""
    for row in ROWS:
        assert 12 < len(row.reason) <= 120, row
        assert row.reason[0].islower() or row.reason[0].isdigit(), row
        assert not row.reason.endswith("."), row
        assert row.reason == " ".join(row.reason.split()), row


@pytest.mark.parametrize("word", ["peer", "autocast", "TensorFlow", "OneFlow", "MXNet", "MindSpore", "MegEngine",
                                  "Paddle", "Apex", "famil", "list"])  # fmt: skip
def test_reasons_speak_to_the_reader_and_not_about_other_frameworks(word: str) -> None:
    assert [row.name for row in ALL_ROWS if word.lower() in row.reason.lower()] == []


@pytest.mark.parametrize("row", [row for row in ROWS if row.keep_args], ids=lambda row: row.name)
def test_kept_arguments_are_arguments_of_the_row_or_its_aliases(row: Row) -> None:
    forms = [row.name, *(alias for alias, target in ALIASES.items() if target == row.name)]
    known = set().union(*(argument_names(form) for form in forms))
    assert set(row.keep_args) <= known


def test_statistics_that_a_backward_reads_are_kept() -> None:
    """A norm's or attention's backward takes what the forward saved in fp32: never cast that."""
    saved = {
        "mean",
        "rstd",
        "save_mean",
        "save_invstd",
        "save_var",
        "running_mean",
        "running_var",
        "logsumexp",
    }
    norms = {"batch_norm", "native_batch_norm", "instance_norm", "native_layer_norm", "native_group_norm"}
    for name in [*norms, "rms_norm", "scaled_dot_product_attention"]:
        forms = [name, *(alias for alias, target in ALIASES.items() if target == name)]
        for form in forms:
            assert argument_names(form) & saved <= set(ROW[name].keep_args), (name, form)


def test_binary_cross_entropy_is_banned_and_names_the_safe_form() -> None:
    banned = {row.name: row.banned for row in ROWS if row.banned}
    assert list(banned) == ["binary_cross_entropy"]
    assert "binary_cross_entropy_with_logits" in banned["binary_cross_entropy"]
    assert ALIASES["binary_cross_entropy_backward"] == "binary_cross_entropy"


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("linear", OpClass.LOW),
        ("convolution_backward", OpClass.LOW),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", OpClass.LOW),
        ("_native_batch_norm_legit_functional", OpClass.FP32),
        ("_log_softmax_backward_data", OpClass.FP32),
        ("nll_loss_forward", OpClass.FP32),
        ("gelu_backward", OpClass.FOLLOW),
        ("threshold_backward", OpClass.FOLLOW),  # relu's, but it asks for the sign of its saved input
        ("embedding_dense_backward", OpClass.FOLLOW),  # embedding's, but it adds rows up
        ("max_pool2d_with_indices", OpClass.FOLLOW),  # max_pool2d's, but rounding makes ties
        ("index_put", OpClass.FOLLOW),  # may accumulate
        ("_unsafe_view", OpClass.EXACT),
        ("slice_backward", OpClass.EXACT),
        ("as_strided", OpClass.KEEP),  # reads memory, not values
        ("copy", OpClass.KEEP),
        ("lift_fresh_copy", OpClass.KEEP),
        ("bernoulli", OpClass.KEEP),
    ],
)
def test_classes_that_others_rely_on(name: str, cls: OpClass) -> None:
    assert ROW[ALIASES.get(name, name)].cls is cls


# --- EXACT: op(round(x)) is round(op(x)), bit for bit -------------------------------------------------

SHAPE = (2, 4, 6, 6)


def rounding_cases() -> Tensor:
    """Values of every kind that rounding treats in its own way, in a random order."""
    generator = torch.Generator().manual_seed(0)
    tiny = [0.0, 1e-45, 1e-40, 2.0**-25, 2.0**-24, 6e-8, 6e-5]
    huge = [65504.0, 65519.9, 65520.0, 1e5, 3.3895e38, 3.4e38, float("inf")]
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
    near_bounds = [0.5 + 2.0**-12, 0.49999, 0.99999, 1.0001, 5.999, 6.001]
    special = torch.tensor([*tiny, *huge, *ties, *near_bounds, 1 / 3])
    special = torch.cat([special, -special])
    count = 2 * 4 * 6 * 6 - len(special)
    size = 10.0 ** (torch.rand(count // 2, generator=generator) * 80 - 42)
    wide = torch.randn(count // 2, generator=generator) * size
    narrow = torch.randn(count - count // 2, generator=generator) * 2
    values = torch.cat([special, wide, narrow])
    return values[torch.randperm(len(values), generator=generator)].reshape(SHAPE)


def mask() -> Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) > 0.5


def places(*size: int, below: int) -> Tensor:
    return torch.randint(0, below, size, generator=torch.Generator().manual_seed(2))


def unpool(x: Tensor, dims: int) -> Tensor:
    """Each value in a place of its own: value i of a plane goes to the plane's place 2 i."""
    image = x if dims == 2 else x.unsqueeze(0)
    spatial = image.shape[-dims:]
    index = (torch.arange(spatial.numel()) * 2).reshape(spatial).expand(image.shape).contiguous()
    if dims == 2:
        return aten.max_unpool2d(image, index, [12, 12])
    return aten.max_unpool3d(image, index, [8, 12, 12], [2, 2, 2], [0, 0, 0])


# How to call each EXACT row (and some aliases) on one float tensor of SHAPE; a second operand is the
# same values in another order. Scalars are values that every dtype holds.
EXACT_CALLS: dict[str, Callable[[Tensor], Any]] = {
    # pooling and resampling
    "max_pool1d": lambda x: aten.max_pool1d(x.flatten(0, 1), [3], [2], [1]),
    "max_pool2d": lambda x: aten.max_pool2d(x, [3, 3], [2, 2], [1, 1]),
    "max_pool3d": lambda x: aten.max_pool3d(x, [2, 2, 2]),
    "max_unpool2d": lambda x: unpool(x, 2),
    "max_unpool3d": lambda x: unpool(x, 3),
    "upsample_nearest1d": lambda x: aten.upsample_nearest1d(x.flatten(0, 1), [9]),
    "upsample_nearest2d": lambda x: aten.upsample_nearest2d(x, [9, 13]),
    "upsample_nearest3d": lambda x: aten.upsample_nearest3d(x.unsqueeze(0), [5, 9, 13]),
    "_upsample_nearest_exact1d": lambda x: aten._upsample_nearest_exact1d(x.flatten(0, 1), [9]),
    "_upsample_nearest_exact2d": lambda x: aten._upsample_nearest_exact2d(x, [9, 13]),
    "_upsample_nearest_exact3d": lambda x: aten._upsample_nearest_exact3d(x.unsqueeze(0), [5, 9, 13]),
    # views
    "view": lambda x: aten.view(x, [8, 36]),
    "view_as": lambda x: aten.view_as(x, torch.empty(8, 36)),
    "reshape": lambda x: aten.reshape(x.transpose(1, 2), [12, -1]),
    "reshape_as": lambda x: aten.reshape_as(x, torch.empty(8, 36)),
    "flatten": lambda x: aten.flatten(x, 1),
    "unflatten": lambda x: aten.unflatten(x, 1, [2, 2]),
    "ravel": aten.ravel,
    "squeeze": lambda x: aten.squeeze(x[:1]),
    "unsqueeze": lambda x: aten.unsqueeze(x, 1),
    "expand": lambda x: aten.expand(x, [3, *SHAPE]),
    "expand_as": lambda x: aten.expand_as(x, torch.empty(3, *SHAPE)),
    "broadcast_to": lambda x: aten.broadcast_to(x, [3, *SHAPE]),
    "broadcast_tensors": lambda x: aten.broadcast_tensors([x, x[:1]]),
    "atleast_1d": lambda x: aten.atleast_1d(x[0, 0, 0, 0]),
    "atleast_2d": lambda x: aten.atleast_2d(x[0, 0, 0]),
    "atleast_3d": lambda x: aten.atleast_3d(x[0, 0]),
    "permute": lambda x: aten.permute(x, [3, 1, 0, 2]),
    "transpose": lambda x: aten.transpose(x, 1, 3),
    "t": lambda x: aten.t(x[0, 0]),
    "numpy_T": lambda x: aten.numpy_T(x[0, 0]),
    "mT": aten.mT,
    "mH": aten.mH,
    "matrix_H": lambda x: aten.matrix_H(x[0, 0]),
    "adjoint": aten.adjoint,
    "movedim": lambda x: aten.movedim(x, 0, 2),
    "select": lambda x: aten.select(x, 1, 2),
    "slice": lambda x: aten.slice(x, 2, 1, 5, 2),
    "narrow": lambda x: aten.narrow(x, 2, 1, 3),
    "split": lambda x: aten.split(x, 4, 2),
    "split_with_sizes": lambda x: aten.split_with_sizes(x, [1, 5], 2),
    "tensor_split": lambda x: aten.tensor_split(x, 4, 2),
    "chunk": lambda x: aten.chunk(x, 3, 2),
    "unbind": lambda x: aten.unbind(x, 1),
    "hsplit": lambda x: aten.hsplit(x, 2),
    "vsplit": lambda x: aten.vsplit(x, 2),
    "dsplit": lambda x: aten.dsplit(x, 2),
    "diagonal": lambda x: aten.diagonal(x, 1, 2, 3),
    "linalg_diagonal": aten.linalg_diagonal,
    "unfold": lambda x: aten.unfold(x, 2, 3, 2),
    "detach": aten.detach,
    "clone": aten.clone,
    "contiguous": lambda x: aten.contiguous(x.transpose(1, 2)),
    "positive": aten.positive,
    "conj": aten.conj,
    "conj_physical": aten.conj_physical,
    "resolve_conj": aten.resolve_conj,
    "resolve_neg": aten.resolve_neg,
    # copies
    "cat": lambda x: aten.cat([x, x.flip(0)], 1),
    "stack": lambda x: aten.stack([x, x.flip(0)], 1),
    "hstack": lambda x: aten.hstack([x, x.flip(0)]),
    "vstack": lambda x: aten.vstack([x, x.flip(0)]),
    "dstack": lambda x: aten.dstack([x, x.flip(0)]),
    "column_stack": lambda x: aten.column_stack([x, x.flip(0)]),
    "block_diag": lambda x: aten.block_diag([x[0, 0], x[1, 1]]),
    "pad_sequence": lambda x: aten.pad_sequence([x[0, 0], x[0, 1, :3]], True, 0.5),
    "_pack_padded_sequence": lambda x: aten._pack_padded_sequence(
        x.flatten(0, 1), torch.tensor([8, 5, 2, 1, 1, 1]), False
    )[0],
    "_pad_packed_sequence": lambda x: aten._pad_packed_sequence(
        x.flatten(0, 2)[:6], torch.tensor([3, 2, 1]), True, 0.5, 3
    )[0],
    "repeat": lambda x: aten.repeat(x, [1, 2, 1, 3]),
    "tile": lambda x: aten.tile(x, [2, 3]),
    "repeat_interleave": lambda x: aten.repeat_interleave(x, 3, 1),
    "meshgrid": lambda x: aten.meshgrid([x[0, 0, 0], x[1, 1, 1]], indexing="ij"),
    "cartesian_prod": lambda x: aten.cartesian_prod([x[0, 0, 0], x[1, 1, 1]]),
    "combinations": lambda x: aten.combinations(x[0, 0, 0], 2),
    "flip": lambda x: aten.flip(x, [0, 2]),
    "fliplr": aten.fliplr,
    "flipud": aten.flipud,
    "roll": lambda x: aten.roll(x, [2], [3]),
    "rot90": lambda x: aten.rot90(x, 1, [2, 3]),
    "fft_fftshift": aten.fft_fftshift,
    "fft_ifftshift": aten.fft_ifftshift,
    "pixel_shuffle": lambda x: aten.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: aten.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: aten.channel_shuffle(x, 2),
    "pad": lambda x: aten.pad(x, [1, 2, 3, 0], "reflect"),
    "constant_pad_nd": lambda x: aten.constant_pad_nd(x, [1, 2], 0.5),
    "reflection_pad1d": lambda x: aten.reflection_pad1d(x[0], [2, 3]),
    "reflection_pad2d": lambda x: aten.reflection_pad2d(x, [2, 3, 1, 0]),
    "reflection_pad3d": lambda x: aten.reflection_pad3d(x, [2, 3, 1, 0, 2, 1]),
    "replication_pad1d": lambda x: aten.replication_pad1d(x[0], [2, 3]),
    "replication_pad2d": lambda x: aten.replication_pad2d(x, [2, 3, 1, 0]),
    "replication_pad3d": lambda x: aten.replication_pad3d(x, [2, 3, 1, 0, 2, 1]),
    "tril": lambda x: aten.tril(x, 1),
    "triu": lambda x: aten.triu(x, -1),
    "diag": lambda x: aten.diag(x[0, 0, 0], 1),
    "diag_embed": aten.diag_embed,
    "diagflat": lambda x: aten.diagflat(x[0, 0]),
    "im2col": lambda x: aten.im2col(x, [3, 3], [1, 1], [1, 1], [2, 2]),
    # lookups and writes
    "index": lambda x: aten.index(x, [None, places(5, below=4)]),
    "index_select": lambda x: aten.index_select(x, 1, places(5, below=4)),
    "gather": lambda x: aten.gather(x, 2, places(2, 4, 3, 6, below=6)),
    "take": lambda x: aten.take(x, places(7, below=288)),
    "take_along_dim": lambda x: aten.take_along_dim(x, places(2, 4, 3, 6, below=6), 2),
    "embedding": lambda x: aten.embedding(x.flatten(0, 2), places(3, 5, below=48)),
    "masked_select": lambda x: aten.masked_select(x, mask()),
    "where": lambda x: aten.where(mask(), x, x.flip(0)),
    "masked_fill": lambda x: aten.masked_fill(x, mask(), float("-inf")),
    "index_fill": lambda x: aten.index_fill(x, 1, torch.tensor([2]), 0.5),
    "masked_scatter": lambda x: aten.masked_scatter(x, mask(), x.flip(0)),
    "index_copy": lambda x: aten.index_copy(x, 1, torch.tensor([2, 0]), x.flip(0)[:, :2]),
    "select_scatter": lambda x: aten.select_scatter(x, x.flip(0)[:, 0], 1, 2),
    "slice_scatter": lambda x: aten.slice_scatter(x, x.flip(0)[:, :2], 1, 1, 3),
    "diagonal_scatter": lambda x: aten.diagonal_scatter(x, x.flip(0)[..., 0], 0, 2, 3),
    # order and sign
    "relu": aten.relu,
    "maximum": lambda x: aten.maximum(x, x.flip(0)),
    "minimum": lambda x: aten.minimum(x, x.flip(0)),
    "fmax": lambda x: aten.fmax(x, x.flip(0)),
    "fmin": lambda x: aten.fmin(x, x.flip(0)),
    "amax": lambda x: aten.amax(x, [2]),
    "amin": lambda x: aten.amin(x, [2]),
    "aminmax": lambda x: aten.aminmax(x, dim=2),
    "msort": aten.msort,
    "clamp": lambda x: aten.clamp(x, -1.0, 0.5),
    "clamp_min": lambda x: aten.clamp_min(x, 0.5),
    "clamp_max": lambda x: aten.clamp_max(x, 0.5),
    "hardtanh": lambda x: aten.hardtanh(x, -1.0, 1.0),
    "relu6": aten.relu6,
    "neg": aten.neg,
    "abs": aten.abs,
    "copysign": lambda x: aten.copysign(x, x.flip(0)),
}

EXACT_ALIAS_CALLS: dict[str, Callable[[Tensor], Any]] = {
    "alias": aten.alias,
    "_unsafe_view": lambda x: aten._unsafe_view(x, [8, 36]),
    "view_copy": lambda x: aten.view_copy(x, [8, 36]),
    "expand_copy": lambda x: aten.expand_copy(x, [3, *SHAPE]),
    "_unsafe_index": lambda x: aten._unsafe_index(x, [None, places(5, below=4)]),
    "slice_backward": lambda x: aten.slice_backward(x, [2, 4, 6, 9], 3, 1, 7, 1),
    "select_backward": lambda x: aten.select_backward(x, [2, 4, 5, 6, 6], 2, 3),
    "diagonal_backward": lambda x: aten.diagonal_backward(x[..., 0], [2, 6, 4, 6], 0, 1, 3),
    "masked_select_backward": lambda x: aten.masked_select_backward(x.flatten()[: mask().sum()], x, mask()),
    "masked_scatter_backward": lambda x: aten.masked_scatter_backward(x, mask(), [int(mask().sum())]),
    "trace_backward": lambda x: aten.trace_backward(x[0, 0, 0, 0], [6, 6]),
}


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def assert_commutes_with_rounding(call: Callable[[Tensor], Any], dtype: torch.dtype) -> None:
    x = rounding_cases()
    after = tensors(call(x))
    before = tensors(call(x.to(dtype)))
    assert len(before) == len(after) > 0
    for low, full in zip(before, after, strict=True):
        assert low.dtype is dtype
        assert full.dtype is torch.float32
        assert torch.equal(low, full.to(dtype))


def test_every_exact_row_is_tried() -> None:
    exact = {row.name for row in ROWS if row.cls is OpClass.EXACT}
    assert exact == set(EXACT_CALLS), "give each EXACT row a call in EXACT_CALLS"


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT_CALLS)
def test_exact_rows_commute_with_rounding(name: str, dtype: torch.dtype) -> None:
    assert_commutes_with_rounding(EXACT_CALLS[name], dtype)


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT_ALIAS_CALLS)
def test_exact_aliases_commute_with_rounding(name: str, dtype: torch.dtype) -> None:
    assert ROW[ALIASES[name]].cls is OpClass.EXACT
    assert_commutes_with_rounding(EXACT_ALIAS_CALLS[name], dtype)


NOT_EXACT: dict[str, Callable[[Tensor], Any]] = {
    "sign": aten.sign,  # fp16: tiny becomes zero
    "round": aten.round,  # 0.5 + tiny becomes 0.5
    "hardshrink": lambda x: aten.hardshrink(x, 0.5),
    "threshold": lambda x: aten.threshold(x, 0.5, 0.0),
    "add": lambda x: aten.add(x, x.flip(0)),
    "threshold_backward": lambda x: aten.threshold_backward(torch.ones_like(x), x, 0),
    "hardtanh_backward": lambda x: aten.hardtanh_backward(torch.ones_like(x), x, -1.0, 1.0),
    "embedding_dense_backward": lambda x: aten.embedding_dense_backward(
        x.flatten(0, 2).clamp(-1, 1), places(48, below=5), 5, -1, False
    ),
}


@pytest.mark.parametrize("name", NOT_EXACT)
def test_near_misses_do_not_commute_and_are_not_exact(name: str) -> None:
    assert ROW[ALIASES.get(name, name)].cls is not OpClass.EXACT
    x = rounding_cases()
    x = x.masked_fill(x.isinf(), 1.0)  # inf - inf would be NaN, which equals nothing
    assert not torch.equal(NOT_EXACT[name](x).half(), NOT_EXACT[name](x.half()))


# --- fp32_inside: low in and out is one rounding away from the fp32 op --------------------------------


def batch_norm(x: Tensor, op: Any, *tail: Any) -> Tensor:
    weight, bias = torch.linspace(0.5, 2, 16), torch.linspace(-1, 1, 16)
    result = op(x, weight, bias, torch.zeros(16), torch.ones(16), True, 0.1, 1e-5, *tail)
    return tensors(result)[0]


FP32_INSIDE_CALLS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "layer_norm": [lambda x: aten.layer_norm(x, [6, 6])],
    "native_layer_norm": [lambda x: aten.native_layer_norm(x, [6, 6], None, None, 1e-5)[0]],
    "group_norm": [lambda x: aten.group_norm(x, 4)],
    "native_group_norm": [lambda x: aten.native_group_norm(x, None, None, 8, 16, 36, 4, 1e-5)[0]],
    "batch_norm": [lambda x: batch_norm(x, aten.batch_norm, False)],
    "native_batch_norm": [lambda x: batch_norm(x, aten.native_batch_norm)],
    "instance_norm": [lambda x: batch_norm(x, aten.instance_norm, False)],
    "rms_norm": [lambda x: aten.rms_norm(x, [6, 6]), lambda x: aten.rms_norm(x, [6])],
    "softmax": [lambda x: aten.softmax(x, -1), lambda x: aten.softmax(x, 1)],
    "_softmax": [lambda x: aten._softmax(x, -1, False), lambda x: aten._softmax(x, 1, False)],
    # the last one: 36 values of about 2400, whose sum would be inf in fp16
    "mean": [aten.mean, lambda x: aten.mean(x, [2, 3]), lambda x: aten.mean(x.abs() * 1024, [2, 3])],
}


def test_every_fp32_inside_row_is_tried() -> None:
    assert {row.name for row in ROWS if row.fp32_inside} == set(FP32_INSIDE_CALLS)
    assert {row.cls for row in ROWS if row.fp32_inside} == {OpClass.FP32}


def ulps_from_fp32(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> float:
    """How far low in and out is from the fp32 op on the same values, in units in the last place."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(8, 16, 6, 6, generator=generator) * 3).to(dtype)
    low, full = call(x), call(x.float())
    assert low.dtype is dtype
    assert full.dtype is torch.float32
    info = torch.finfo(dtype)
    ulp = info.eps * full.abs().clamp_min(info.smallest_normal)
    noise = 1e-6  # of fp32 itself, where a norm's or a mean's terms cancel
    return (((low.float() - full).abs() - noise) / ulp).max().item()


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("name", FP32_INSIDE_CALLS)
def test_fp32_inside_rows_are_within_one_ulp_of_fp32(name: str, dtype: torch.dtype) -> None:
    # Half an ulp is the last rounding. The CPU's softmax over another axis than the last rounds its
    # exponentials too (0.9 ulp), and still stays below one.
    for call in FP32_INSIDE_CALLS[name]:
        assert ulps_from_fp32(call, dtype) <= 1.0


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_log_softmax_is_not_fp32_inside_on_the_cpu(dtype: torch.dtype) -> None:
    """Why its row says so. When torch mends the kernel, this fails and the row may change."""
    assert ulps_from_fp32(lambda x: aten._log_softmax(x, -1, False), dtype) > 2.0
    assert not ROW["log_softmax"].fp32_inside
    assert not ROW["_log_softmax"].fp32_inside
