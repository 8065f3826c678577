"""The exponents of growth.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_helpers import load

growth = load("growth")
Exponents = growth.Exponents
SIZES = [0, 2, 4, 8, 16]


def law(exponent: float, constant: float, factor: float = 1.0) -> list[float]:
    return [constant + (factor * size**exponent if size else 0.0) for size in SIZES]


def rounds(*values: list[float]) -> list[list[float]]:
    """For each size its value in each round."""
    return [list(column) for column in zip(*values, strict=True)]


@given(st.floats(0.5, 2.5), st.floats(0.1, 50.0), st.floats(0.5, 10.0))
def test_a_constant_part_hides_nothing(exponent: float, constant: float, factor: float) -> None:
    found = Exponents.of(SIZES, rounds(law(exponent, constant, factor)))
    assert found.known == pytest.approx([exponent], abs=1e-4)
    assert found.whole[0] < exponent


@pytest.mark.parametrize(("exponent", "verdict"), [(0.9, "yes"), (1.0, "yes"), (1.09, "yes"), (1.11, "no"), (2, "no")])
def test_the_limit(exponent: float, verdict: str) -> None:
    assert Exponents.of(SIZES, rounds(law(exponent, 3.0))).at_most == verdict


def test_layers_that_add_less_than_the_noise() -> None:
    found = Exponents.of([0, 2, 4], [[2.0, 1.0], [1.9, 2.0], [2.1, 3.0]])
    assert found.added[0] is None
    assert found.added[1] == pytest.approx(1.0)
    assert Exponents.of([0, 2, 4], [[2.0], [1.9], [2.1]]).at_most == "the layers add less than the noise"


def test_steeper_only_beyond_noise() -> None:
    linear, steep = rounds(*[law(1.0, 1.0)] * 6), rounds(*[law(1.2, 1.0)] * 6)
    fp32, ours = Exponents.of(SIZES, linear), Exponents.of(SIZES, steep)
    assert ours.steeper_than(fp32)
    assert not fp32.steeper_than(ours)
    assert not fp32.steeper_than(fp32)
    mixed = Exponents.of(SIZES, rounds(*[law(1.0 + offset, 1.0) for offset in (-0.2, 0.2, -0.1, 0.1, -0.3, 0.3)]))
    assert not mixed.steeper_than(fp32)


def test_it_names_every_size_in_every_round() -> None:
    """What slows the machine down for a while hits all sizes."""
    order: list[tuple[int, str]] = []

    def cases(subject: int) -> dict[str, object]:
        return {name: lambda name=name: order.append((subject, name)) or 1.0 for name in ("ours", "peer")}

    found = dict(growth.in_turns([2, 8], cases, 2))
    assert found == {2: {"ours": [1.0, 1.0], "peer": [1.0, 1.0]}, 8: {"ours": [1.0, 1.0], "peer": [1.0, 1.0]}}
    assert set(order[:4]) == set(order[4:]) == {(2, "ours"), (2, "peer"), (8, "ours"), (8, "peer")}


@pytest.mark.parametrize("model", ["bert", "llama"])
def test_a_network_without_layers_trains(model: str) -> None:
    data = growth.batch(model)
    for way in growth.WAYS.values():
        way(growth.make(model, 0, 16), data)()
