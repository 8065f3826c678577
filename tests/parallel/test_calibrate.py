"""``calibrate`` in several processes, each with its own batches."""

from __future__ import annotations

import pytest
from parallel.diagonal import DIAGONAL
from parallel.harness import results, value

MODULE = "cases_calibrate"


@pytest.fixture(scope="module")
def answers():
    return results(MODULE, 2, DIAGONAL[MODULE])


def test_all_processes_get_what_one_would_with_all_batches(answers):
    first, second = value(answers, "together")
    assert first == second
    (head, rows), (alone_head, alone) = first
    assert head == alone_head
    assert head[0] == 2
    for mine, one in zip(rows, alone, strict=True):
        assert mine[:4] == one[:4]
        assert mine[4] == pytest.approx(one[4])


def test_a_process_that_fails_does_not_leave_the_others_waiting(answers):
    first, second = value(answers, "failing")
    assert "failed in rank 1" in first
    assert "source of batches is empty" in second
