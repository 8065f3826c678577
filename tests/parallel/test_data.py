"""``compile_train_step(parallel=DataParallel())`` on two gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.diagonal import DIAGONAL
from parallel.harness import results, value
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from amp_compiler import ArgumentError, DataParallel, compile_train_step

NAMES = DIAGONAL["cases_data"]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    return results("cases_data", 2, NAMES)


@pytest.mark.parametrize(
    "case",
    ["gradients fp16", "gradients bf16", "gradients accumulated", "gradients without a scaler",
     "gradients in small buckets", "gradients in pieces"],
)  # fmt: skip
def test_gradients_are_the_mean_of_single_processes(answers: dict[str, list[Any]], case: str) -> None:
    found = value(answers, case)
    for rank in found:
        assert rank["unequal"] == []
        assert rank["updated"]
    assert found[0]["norm"] == found[1]["norm"]
    assert found[0]["sum"] == found[1]["sum"]  # the parameters are the same after the update


def check_used(found: list[Any]) -> None:
    for rank in found:
        assert rank["unequal"] == []
        assert rank["graphs"] >= 2  # it stays one graph per step


def test_low_reduction_is_close_to_the_wide_one(answers: dict[str, list[Any]]) -> None:
    found = value(answers, "gradients sent in bf16")
    assert all(rank["close"] and rank["unequal"] for rank in found)
    assert found[0]["sum"] == found[1]["sum"]


@pytest.mark.parametrize("case", ["overflow", "overflow accumulated", "overflow in pieces"])
def test_all_ranks_skip_if_one_overflows(answers: dict[str, list[Any]], case: str) -> None:
    for rank in value(answers, case):
        assert rank["skipped"]
        assert rank["changed"] == []
        assert rank["scale"] == rank["was"] / 2


@pytest.mark.parametrize("case", ["overflow", "overflow accumulated", "overflow in pieces"])
def test_the_process_that_overflowed_says_why(answers: dict[str, list[Any]], case: str) -> None:
    other, culprit = value(answers, case)
    assert other["phase"] == "process", other["told"]
    assert "another process" in other["told"]
    assert culprit["phase"] == "input", culprit["told"]
    assert "which float16 cannot hold" in culprit["told"]


def test_flush_reduces(answers: dict[str, list[Any]]) -> None:
    assert [rank["unequal"] for rank in value(answers, "flush")] == [[], []]


def test_a_parameter_that_some_micro_batches_use_is_averaged_there(answers: dict[str, list[Any]]) -> None:
    check_used(value(answers, "used in the first micro-batch only"))


@pytest.mark.distributed
def test_a_parameter_that_later_steps_use_is_averaged_there() -> None:
    check_used(value(results("cases_data", 2, ("used later",)), "used later"))


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("another width", "rank 0 has weight (4, 8)"),
        ("another level", "level: rank 0 has O2; rank 1 has O1"),
        ("another black list", "the policy: rank 0 has"),
        ("another batch", "the shapes of the batch: rank 0 has (6, 8) and (6,); rank 1 has (7, 8) and (7,)"),
    ],
)
def test_ranks_that_differ_are_told_so(answers: dict[str, list[Any]], case: str, what: str) -> None:
    for told in value(answers, case):
        assert what in told
        assert "do not run the same thing" in told


def test_without_a_process_group() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"torch\.distributed is not initialized.*torchrun"):
        compile_train_step(model, torch.nn.functional.mse_loss, optimizer, parallel=DataParallel())


@pytest.mark.parametrize("options", [{"bucket_mb": 0}, {"bucket_mb": "25"}, {"reduce_dtype": torch.int8}])
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        DataParallel(**options)


def test_what_is_not_a_way_to_train_together() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="parallel must be"):
        compile_train_step(model, torch.nn.functional.mse_loss, optimizer, parallel="data")  # type: ignore[arg-type]


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_is_wrapped_already_is_refused(alone: None) -> None:
    inner = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"wrapped in DistributedDataParallel.*\.module"):
        compile_train_step(DDP(inner), torch.nn.functional.mse_loss, optimizer, parallel=DataParallel())


def test_the_pass_that_averages_cannot_be_switched_off(alone: None) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="cannot be in disable_passes"):
        compile_train_step(
            model, torch.nn.functional.mse_loss, optimizer, parallel=DataParallel(), disable_passes=["reduce_gradients"]
        )


def test_a_mesh_of_two_dimensions_is_refused(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"2 dimensions.*mesh\['data'\]"):
        compile_train_step(model, torch.nn.functional.mse_loss, optimizer, parallel=DataParallel(mesh))
    step = compile_train_step(model, torch.nn.functional.mse_loss, optimizer, parallel=DataParallel(mesh["data"]))
    assert bool(step(torch.ones(1, 2), torch.ones(1, 2)).updated)
