"""Seconds of ``cast_matmul_triton.py`` on a GPU, estimated, and the configuration with the least of them.

The estimate is a roofline. It is made of figures of the compiled kernel (``cast_matmul_figures.py``): how many programs
a processor runs at once, and what one step of the loop issues, converts, and moves through shared memory and from
memory; and of the data sheet of one GPU per target. None of it was measured. The launcher asks ``choose``, and the
compiler asks ``estimate`` whether the kernel is worth using at all, so that both count on the same configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from .cast_matmul_configs import MOST_PIECES, SHORTEST, TARGETS, Config, ceil_div, piece_length
from .cast_matmul_figures import FIGURES

TERA, GIGA = 1e12, 1e9
#: share of a data sheet's bandwidth that a kernel which only moves bytes reaches
STREAMED = 0.8
#: bandwidth of the L2 cache, as a multiple of the memory's
CACHE = 3.0
#: seconds that a kernel takes at least, and from a load to its data, of a memory that is busy: several hundred clocks
LAUNCH, LATENCY = 3e-6, 0.6e-6
#: estimates that differ by less count as equal: then the configuration that computes for the shortest time is taken
MARGIN = 1.05
LOW_BYTES, FP32_BYTES = 2, 4


class Rates(NamedTuple):
    """One GPU of a target: its data sheet, and what a multiprocessor or compute unit does in one clock, from CUDA's
    programming guide and AMD's manuals."""

    clock: float  # GHz, at most
    bandwidth: float  # GB/s
    #: TFLOP/s of the vendor's library, cuBLAS or hipBLASLt, called by torch.mm on bf16 matrices of the best shape: Stas
    #: Bekman, "Machine Learning Engineering", table of maximum achievable matmul FLOPS. Clocks are lower under load, so
    #: our kernel gets no more of its tensor cores either.
    multiplied: float
    issued: float = 4  # instructions of a warp (AMD: of a vector unit; there are four, and each takes four clocks)
    converted: float = 2  # of these, conversions to low precision
    shared: int = 128  # bytes of shared memory


RATES = {
    "sm_80": Rates(1.41, 2039, 267.9),
    "sm_86": Rates(1.695, 936, 49.7),  # no rate was published: 70 % of the data sheet's
    "sm_90": Rates(1.98, 3350, 794.5),
    "sm_100": Rates(1.98, 8000, 1745.0),
    "gfx942": Rates(2.1, 5300, 781.9, 1, 1),
}


class Shape(NamedTuple):
    """``batch`` products of an [m, k] by a [k, n] matrix. ``wide``: which one is fp32, "left" or "right"; figures exist
    for these. ``low``: the dtype of the product, which matters on AMD's GPUs only."""

    m: int
    n: int
    k: int
    batch: int = 1
    wide: str = "right"
    low: str = "fp16"


class Estimate(NamedTuple):
    """Seconds of our kernel, what takes most of them, and the configuration."""

    seconds: float
    limit: str
    config: Config
    pieces: int
    programs: int  # that a processor runs at once
    computing: float  # seconds, if memory delivered everything at once


def estimate(shape: Shape, target: str, config: Config, pieces: int) -> Estimate:
    """The seconds of a product in one configuration, with K in so many pieces.

    A processor runs several programs at once. They share its units, so a unit that all need sets the pace; and one
    program by itself converts a tile, multiplies it, and waits for the loads that are not there yet, one after another.
    """
    rates, processors = RATES[target], TARGETS[target].processors
    figures = FIGURES[target, config.name, f"{shape.wide} {shape.low if target == 'gfx942' else 'fp16'}"]
    clock, rows, columns = rates.clock * GIGA, config.block_m, config.block_n
    multiplying = 2 * rows * columns * config.block_k / (rates.multiplied * TERA / processors)
    needs = {
        "tensor cores": multiplying,
        "issuing instructions": figures.instructions * config.warps / rates.issued / clock,
        "converting": figures.converts * config.warps / rates.converted / clock,
        "shared memory": figures.shared / rates.shared / clock,
        "the L2 cache": figures.loaded / (rates.bandwidth * GIGA * CACHE / processors),
    }
    converting = max(needs["issuing instructions"], needs["converting"], needs["shared memory"])
    alone = max(multiplying + converting, LATENCY / max(config.stages - 1, 1))
    busiest = max(needs, key=lambda name: needs[name])

    def turn(programs: int) -> float:
        return max(programs * needs[busiest], alone)

    total = shape.batch * ceil_div(shape.m, rows) * ceil_div(shape.n, columns) * pieces
    rounds, rest = divmod(ceil_div(total, processors), figures.programs)
    steps = ceil_div(shape.k if pieces == 1 else piece_length(shape.k, pieces), config.block_k)
    computing = steps * (rounds * turn(figures.programs) + (turn(rest) if rest else 0.0))
    computing += LATENCY * (rounds + bool(rest))  # the first load of a program has nothing to hide behind
    left, right = (FP32_BYTES if shape.wide == side else LOW_BYTES for side in ("left", "right"))
    sums = 2 * pieces * shape.m * shape.n * FP32_BYTES if pieces > 1 else 0
    operands = shape.m * shape.k * left + shape.k * shape.n * right + shape.m * shape.n * LOW_BYTES
    moving = shape.batch * (operands + sums) / (rates.bandwidth * GIGA * STREAMED)
    together = min(figures.programs, ceil_div(total, processors))
    limit = "memory" if moving > computing else busiest if turn(together) > alone else "one program's steps in turn"
    launches = LAUNCH * (2 if pieces > 1 else 1)
    found = max(computing, moving) + launches
    return Estimate(found, limit, config, pieces, figures.programs, computing + launches)


def candidates(shape: Shape, target: str, aligned: bool = True) -> Iterator[tuple[Config, int]]:
    """Every configuration with every number of pieces of K that the kernel allows: more than one only where that does
    not make programs wait for others. Operands that are not aligned have the configurations that support them."""
    for config in TARGETS[target].configs:
        if not aligned and not config.takes_unaligned:
            continue
        tiles = shape.batch * ceil_div(shape.m, config.block_m) * ceil_div(shape.n, config.block_n)
        most = min(TARGETS[target].processors // max(1, tiles), shape.k // SHORTEST, MOST_PIECES)
        yield config, 1
        for pieces in range(2, most + 1):
            if ceil_div(shape.k, piece_length(shape.k, pieces)) == pieces:
                yield config, pieces


@functools.lru_cache(maxsize=4096)
def best(shape: Shape, target: str, aligned: bool = True) -> Estimate:
    """The estimate of the configuration that is chosen: within ``MARGIN`` of the fastest, it computes for the shortest
    time. Where memory limits all of them, that is the one with most to spare."""
    found = [estimate(shape, target, config, pieces) for config, pieces in candidates(shape, target, aligned)]
    fastest = min(one.seconds for one in found)
    return min((one for one in found if one.seconds <= MARGIN * fastest), key=lambda one: one.computing)


def choose(shape: Shape, target: str, aligned: bool = True) -> tuple[Config, int]:
    """Return a configuration for a product, and the number of pieces of K.

    >>> choose(Shape(4096, 4096, 4096), "sm_90")[0].name
    '128x256x32 w8 s4'
    >>> choose(Shape(16, 1024, 8192), "sm_90")[1]
    8
    """
    found = best(shape, target, aligned)
    return found.config, found.pieces
