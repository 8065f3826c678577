"""A model that ``Sharded`` has divided follows what its user does with it between steps, on two gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
from parallel.diagonal import DIAGONAL
from parallel.harness import results, value

NAMES = DIAGONAL["cases_sharded_state"]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    return results("cases_sharded_state", 2, NAMES)


def test_a_layer_that_is_frozen_and_unfrozen_trains_as_in_one_process(answers: dict[str, list[Any]]) -> None:
    for rank in value(answers, "frozen"):
        assert rank["plain"] == [False, False, True, True, False, False]
        assert rank["sharded"] == rank["plain"]


def test_what_is_written_to_the_gathered_model_is_kept(answers: dict[str, list[Any]]) -> None:
    for rank in value(answers, "written"):
        assert rank == {"wrong": [], "updated": True}


def test_a_layer_that_some_steps_use(answers: dict[str, list[Any]]) -> None:
    """Both ranks have the same batch, so the weights are those of one process."""
    for rank in value(answers, "used later"):
        assert rank["unequal"] == []


def test_an_underflow_is_explained_as_in_one_process(answers: dict[str, list[Any]]) -> None:
    for rank in value(answers, "explained"):
        share, _, parameters, better = rank["plain"]
        assert 0 < share < 1
        assert parameters
        assert better > 1
        assert rank["sharded"] == rank["plain"]
