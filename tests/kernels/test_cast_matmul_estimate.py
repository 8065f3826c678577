"""Which configuration of the Triton product a shape gets: the one that the estimate finds fastest."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_compiler.kernels.cast_matmul_configs import MOST_PIECES, SHORTEST, TARGETS, Config, piece_length
from amp_compiler.kernels.cast_matmul_estimate import MARGIN, RATES, Shape, best, candidates, choose, estimate

SIZES = st.integers(1, 10000) | st.integers(1, 640).map(lambda n: 16 * n)
SHAPES = st.builds(
    Shape, SIZES, SIZES, st.integers(0, 100000) | SIZES, st.integers(1, 100), st.sampled_from(["left", "right"]),
    st.sampled_from(["fp16", "bf16"]),
)  # fmt: skip


def test_every_target_has_rates() -> None:
    assert RATES.keys() == TARGETS.keys()


@given(SHAPES, st.sampled_from(sorted(TARGETS)), st.booleans())
def test_no_faster_configuration_is_passed_over(shape: Shape, target: str, aligned: bool) -> None:
    """Every configuration that the operands allow, with every number of pieces that the kernel allows, written down
    anew: what the estimate says of the chosen one is within the margin of the least."""
    chosen = best(shape, target, aligned)
    seconds = []
    for config in TARGETS[target].configs:
        if not aligned and not config.takes_unaligned:
            continue
        tiles = shape.batch * -(-shape.m // config.block_m) * -(-shape.n // config.block_n)
        for pieces in range(1, MOST_PIECES + 1):
            allowed = tiles * pieces <= TARGETS[target].processors and pieces * SHORTEST <= shape.k
            real = -(-shape.k // piece_length(shape.k, pieces))  # pieces are multiples of a step
            if pieces == 1 or (allowed and real == pieces):
                seconds.append(estimate(shape, target, config, pieces).seconds)
    assert chosen.seconds <= MARGIN * min(seconds)
    assert chosen == estimate(shape, target, *choose(shape, target, aligned))


@given(SHAPES, st.sampled_from(sorted(TARGETS)), st.booleans())
def test_a_choice_can_be_launched(shape: Shape, target: str, aligned: bool) -> None:
    config, pieces = choose(shape, target, aligned)
    assert config in TARGETS[target].configs
    assert aligned or config.takes_unaligned
    assert 1 <= pieces <= max(1, shape.k // SHORTEST)
    tiles = shape.batch * -(-shape.m // config.block_m) * -(-shape.n // config.block_n)
    assert pieces == 1 or tiles * pieces <= TARGETS[target].processors
    assert pieces == max(1, -(-shape.k // piece_length(shape.k, pieces)))  # no piece is empty


@pytest.mark.parametrize("target", TARGETS)
def test_where_memory_limits_all_the_one_that_computes_least_is_taken(target: str) -> None:
    """A large tile reads 16 rows against a large weight no slower, but most of what it computes is padding."""
    shape = Shape(16, 11008, 4096)
    chosen = best(shape, target)
    assert chosen.limit == "memory"
    assert chosen.config.block_m == 16
    equal = [estimate(shape, target, *one) for one in candidates(shape, target)]
    assert any(one.config.block_m > 16 and one.seconds <= MARGIN * chosen.seconds for one in equal)


def test_choices_worth_having() -> None:
    """Each configuration wins somewhere: none is there for nothing."""
    some = (1, 16, 32, 64, 192, 512, 1024, 2048, 4096)
    for name, target in TARGETS.items():
        shapes = (Shape(m, n, k, batch) for m, n, k, batch in product(some, some, (64, 1024, 8192), (1, 12)))
        chosen: set[Config] = {choose(shape, name)[0] for shape in shapes}
        assert chosen == set(target.configs), name
