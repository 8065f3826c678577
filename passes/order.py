"""The order of the passes, from top to bottom, and the pipelines that run them.

capture ─▶ normalize ─▶ mark_dtype_origin ─▶ assign_precision ─▶ place_neutral ─▶ insert_casts ─▶ autodiff
           └───────────────────────────────────── FORWARD ────────────────────────────────────┘
autodiff ─▶ fold_casts ─▶ fold_views ─▶ flatten_products ─▶ fuse_cast_matmul ─▶ lower_kernels ─▶ batch_casts ─▶ run
            └───── JOINT; INFERENCE, which has finish_products after fuse_cast_matmul ─────────────────────┘
autodiff ─▶ widen_gradients ─▶ scale_loss ─▶ reduce_gradients, scatter_gradients ─▶ fold_casts ─▶ fold_views
            └── STEP (a whole training step)  ─▶ gather_parameters ─▶ hoist_weight_casts ─▶ flatten_products
                                                 ─▶ fuse_cast_matmul ─▶ lower_kernels ─▶ batch_casts
                                                 ─▶ accumulate_in_place, unscale_in_place or reduce_in_place ─▶ run
export ─▶ normalize ─▶ mark_dtype_origin ─▶ remove_dropout ─▶ fold_constants ─▶ fold_batch_norm
          └─────────────────────────────────── PREPARE ───────────────────────────────────────┘
       ─▶ assign_precision ─▶ insert_casts ─▶ freeze_parameters ─▶ fold_casts ─▶ save
          └──────────────────────────── CONVERT ──────────────────────────┘
       ─▶ widen_weights ─▶ fold_casts ─▶ fold_views ─▶ flatten_products ─▶ fuse_cast_matmul ─▶ finish_products
          └─ RUN_CONVERTED (in memory, functional ATen)  ─▶ lower_kernels ─▶ run
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from amp_compiler.common.errors import ArgumentError
from amp_compiler.common.messages import suggestion
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline

from . import (
    accumulate_in_place,
    batch_casts,
    finish_products,
    flatten_products,
    fold_batch_norm,
    fold_casts,
    fold_constants,
    fold_views,
    freeze_parameters,
    fuse_cast_matmul,
    gather_parameters,
    hoist_weight_casts,
    insert_casts,
    lower_kernels,
    mark_dtype_origin,
    normalize,
    place_neutral,
    precision,
    reduce_gradients,
    reduce_in_place,
    remove_dropout,
    scale_loss,
    scatter_gradients,
    unscale_in_place,
    widen_gradients,
    widen_weights,
)

FORWARD = (normalize.PASS, mark_dtype_origin.PASS, precision.PASS, place_neutral.PASS, insert_casts.PASS)
JOINT = (
    fold_casts.PASS, fold_views.PASS, flatten_products.PASS, fuse_cast_matmul.PASS, lower_kernels.PASS,
    batch_casts.PASS,
)  # fmt: skip
INFERENCE = (
    fold_casts.PASS, fold_views.PASS, flatten_products.PASS, fuse_cast_matmul.PASS, finish_products.PASS,
    lower_kernels.PASS, batch_casts.PASS,
)  # fmt: skip
STEP = (
    widen_gradients.PASS, scale_loss.PASS, reduce_gradients.PASS, scatter_gradients.PASS, fold_casts.PASS,
    fold_views.PASS, gather_parameters.PASS, hoist_weight_casts.PASS, flatten_products.PASS, fuse_cast_matmul.PASS,
    lower_kernels.PASS, batch_casts.PASS, accumulate_in_place.PASS, unscale_in_place.PASS, reduce_in_place.PASS,
)  # fmt: skip
PREPARE = (normalize.PASS, mark_dtype_origin.PASS, remove_dropout.PASS, fold_constants.PASS, fold_batch_norm.PASS)
CONVERT = (precision.PASS, insert_casts.PASS, freeze_parameters.PASS, fold_casts.PASS)
RUN_CONVERTED = (
    widen_weights.PASS, fold_casts.PASS, fold_views.PASS, flatten_products.PASS, fuse_cast_matmul.PASS,
    finish_products.PASS, lower_kernels.PASS,
)  # fmt: skip
#: names of the passes that choose kernels for the CPU that is here, which say nothing of another device
OF_THIS_CPU = (
    flatten_products.PASS.name, fuse_cast_matmul.PASS.name, finish_products.PASS.name, lower_kernels.PASS.name,
)  # fmt: skip
WEIGHTS = (batch_casts.PASS,)  # on the graph that makes the low copies of weights, once per update

ALL = {p.name: p for p in (*FORWARD, *JOINT, *INFERENCE, *STEP, *PREPARE, *CONVERT, *RUN_CONVERTED)}


@dataclass(frozen=True)
class Pipelines:
    """The passes for each kind of graph."""

    forward: Pipeline
    joint: Pipeline
    inference: Pipeline
    step: Pipeline
    weights: Pipeline
    prepare: Pipeline
    convert: Pipeline
    run_converted: Pipeline


def build(disable: Iterable[str] = ()) -> Pipelines:
    """Return the pipelines, with the named passes switched off."""
    off = frozenset(check_names(disable))
    return Pipelines(
        forward=Pipeline(FORWARD, (facts.CAPTURED,), off),
        joint=Pipeline(JOINT, (facts.FUNCTIONAL, facts.PAST_AUTOGRAD), off),
        inference=Pipeline(INFERENCE, (facts.FUNCTIONAL, facts.PAST_AUTOGRAD), off),
        step=Pipeline(STEP, (facts.FUNCTIONAL, facts.PAST_AUTOGRAD, facts.STEP), off),
        weights=Pipeline(WEIGHTS, (facts.FUNCTIONAL, facts.PAST_AUTOGRAD, facts.FOLDED), off),
        prepare=Pipeline(PREPARE, (facts.CAPTURED, facts.PAST_AUTOGRAD), off),
        convert=Pipeline(CONVERT, (facts.CAPTURED, facts.PAST_AUTOGRAD, facts.NORMALIZED, facts.ORIGIN), off),
        run_converted=Pipeline(RUN_CONVERTED, (facts.FUNCTIONAL, facts.PAST_AUTOGRAD), off),
    )


def check_names(names: Iterable[str]) -> list[str]:
    """Return the names as a list; raise, with the closest match as a hint, if one is not the name of a pass."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError(f"disable_passes must be a list of names: write [{names!r}].")
    given = list(names)
    for name in given:
        if name not in ALL:
            hint = f"{suggestion(str(name), ALL)} Passes: {', '.join(ALL)}.".strip()
            raise ArgumentError(f"Unknown pass {name!r}.", hint=hint)
    return given
