"""Parameters that are stored in bf16, trained by two gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
from parallel.diagonal import DIAGONAL
from parallel.harness import results, value

Answers = dict[str, list[Any]]
NAMES = DIAGONAL["cases_low"]
ALL = ("data in pieces", "data, used by one", "data stochastic", "data kahan", "sharded kahan", "FSDP2")


@pytest.fixture(scope="module")
def answers() -> Answers:
    return results("cases_low", 2, NAMES)


@pytest.fixture(scope="module")
def everything() -> Answers:
    return results("cases_low", 2, ALL)


@pytest.mark.parametrize("case", ["data", "sharded"])
def test_masters_are_the_weights_of_the_fp32_model_in_every_process(answers: Answers, case: str) -> None:
    first, second = value(answers, case)
    assert first["sums"] == second["sums"]
    assert first["masters"] == first["fp32"]
    assert len(first["masters"]) == 4


def test_a_sharded_run_continues_with_its_masters(answers: Answers) -> None:
    for rank in value(answers, "resumed"):
        assert rank["sums"] == rank["again"]
        assert rank["rows"] == [2, 8]  # of 4 and of 16


def test_a_wrapped_model(answers: Answers) -> None:
    first, second = value(answers, "DDP")
    assert first["sums"] == second["sums"]
    assert all(first["masters"])


def test_what_is_refused(answers: Answers) -> None:
    for told in value(answers, "refused"):
        assert 'use "kahan", or True' in told
    for told in value(answers, "disagreement"):
        assert "master_weights: rank 0 has True; rank 1 has kahan" in told


@pytest.mark.distributed
@pytest.mark.parametrize("case", [name for name in ALL if name != "FSDP2"])
def test_all_processes_have_the_same(everything: Answers, case: str) -> None:
    first, second = value(everything, case)
    assert first["sums"] == second["sums"]


@pytest.mark.distributed
def test_fully_shard(everything: Answers) -> None:
    first, second = value(everything, "FSDP2")
    assert first["sums"] == second["sums"]
    assert all(first["masters"])
    assert all(first["moved"])
