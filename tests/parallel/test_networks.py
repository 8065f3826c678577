"""``DataParallel`` on every network of the tests: precisions as in one process, gradients the mean, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
from parallel.diagonal import DIAGONAL
from parallel.harness import results, value

from networks import NETWORKS

SMALL = DIAGONAL["cases_networks"]
ALL = (
    *(f"{name} {dtype}" for dtype in ("bf16", "fp16") for name in (*NETWORKS, "bert", "checkpointed", "curves")),
    "inductor bf16",
)


@pytest.fixture(scope="module")
def small() -> dict[str, list[Any]]:
    return results("cases_networks", 2, SMALL)


@pytest.fixture(scope="module")
def everything() -> dict[str, list[Any]]:
    return results("cases_networks", 2, ALL)


def check(found: list[Any]) -> None:
    for rank in found:
        assert rank["unequal"] == []
        assert rank["ours"] == rank["theirs"]


def check_curves(found: list[Any]) -> None:
    for rank in found:
        ours, theirs = rank["ours"], rank["theirs"]
        assert ours[-1] < 0.6 * ours[0]  # it learns
        # both round in the same dtype at different places: the curves stay closer than a step changes the loss
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.05 * ours[0]


@pytest.mark.parametrize("case", [name for name in SMALL if "curves" not in name])
def test_gradients_are_the_mean(small: dict[str, list[Any]], case: str) -> None:
    check(value(small, case))


def test_twenty_steps_beside_autocast_and_ddp(small: dict[str, list[Any]]) -> None:
    check_curves(value(small, "curves bf16"))


@pytest.mark.distributed
@pytest.mark.parametrize("case", ALL)
def test_all_networks(everything: dict[str, list[Any]], case: str) -> None:
    (check_curves if "curves" in case else check)(value(everything, case))
