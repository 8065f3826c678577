"""The conditions under which passes apply. The callers of a pipeline describe the situation in ``Context``."""

from __future__ import annotations

from ..kernels import registry
from .base import Condition

#: Inductor does the same by itself, or plans memory by itself
EAGER = Condition("the eager backend", lambda ctx: ctx.backend == "eager")
#: with one batch per update there is nothing to gain, and copies would live longer
ACCUMULATES = Condition("several micro-batches per update", lambda ctx: ctx.accumulates)
SCALES_LOSS = Condition("a loss scale", lambda ctx: ctx.scales_loss)
UPDATES_IN_FP32 = Condition(
    "low-precision parameters that are updated in fp32", lambda ctx: ctx.updates_in_fp32, asked=True
)
#: torch's partitioner, which decides what is recomputed, accepts functional graphs only
RECOMPUTES_NOTHING = Condition("a step without activation checkpointing", lambda ctx: not ctx.recomputes)
KNOWS_COSTS = Condition("a device, whose costs are known", lambda ctx: ctx.costs is not None, asked=True)
REDUCES = Condition("gradients that several processes share", lambda ctx: ctx.reduction is not None)
SHARDS = Condition("parameters that are divided among processes", lambda ctx: ctx.sharding is not None)
#: the sums are reduced in this graph, which adds to them by itself
ADDS_ONLY = Condition("a micro-batch whose gradients are not reduced", lambda ctx: ctx.reduction is None)
STORES_LOW = Condition("cast_params", lambda ctx: ctx.weights is None or ctx.weights.store_low)
CACHES_WEIGHTS = Condition("cache_weights", lambda ctx: ctx.caches_weights)
#: the compiled kernels pack low weights as fast as fp32 ones: fp32 copies would only cost memory
KERNELS_IN_PYTHON = Condition("kernels that are not compiled", lambda ctx: not registry.loaded())
