"""``compile_train_step(parallel=Sharded())`` on two gloo ranks, and its checkpoints on other numbers of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.diagonal import DIAGONAL
from parallel.harness import results, value

from amp_compiler import ArgumentError, Sharded, compile_train_step

SMALL = DIAGONAL["cases_checkpoint"]
#: bit-equal to the sum over micro-batches of the means of single processes' gradients
GRADIENTS = (
    "sequential bf16", "sequential fp16", "tied fp16", "bert bf16", "bert fp16", "convolutions bf16",
    "convolutions fp16", "recurrent bf16", "mixed bf16", "checkpointed bf16", "accumulated", "without a scaler",
    "not resharded", "large", "large accumulated", "O0", "O1", "O3", "inductor",
)  # fmt: skip
ALL = (
    *GRADIENTS, "sent in bf16", "clipped", "low only", "overflow", "copied", "evaluated", "frozen", "changing sizes",
    "refused", "disagreement", "one model, two steps", "again in the middle of an update",
)  # fmt: skip
Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def small() -> Answers:
    return results("cases_checkpoint", 2, SMALL)


@pytest.fixture(scope="module")
def everything() -> Answers:
    return results("cases_checkpoint", 2, ALL)


def check_gradients(found: list[Any]) -> None:
    for rank in found:
        assert rank["unequal"] == []
        assert rank["by_precision"] == rank["alone"]
        assert rank["updated"]
        assert math.isclose(rank["norm"], rank["norm_of_means"], rel_tol=1e-6)
    assert found[0]["norm"] == found[1]["norm"]
    assert found[0]["sum"] == found[1]["sum"]
    assert found[0]["gathers"] == found[1]["gathers"]


def check_overflow(found: list[Any]) -> None:
    for rank in found:
        assert rank["skipped"]
        assert rank["changed"] == []
        assert rank["scale"] == rank["was"] / 2
        assert set(rank["left"]) == {"DTensor"}  # looking for the cause leaves the model divided
        assert rank["again"]
    assert "3.11e+30" in found[1]["told"]


@pytest.mark.parametrize("case", ["tied bf16"])
def test_gradients_are_the_mean_of_single_processes(small: Answers, case: str) -> None:
    found = value(small, case)
    check_gradients(found)
    numbers = 1  # parameters of no dimensions are whole in every rank
    assert found[0]["local"] + found[1]["local"] == found[0]["numel"] + numbers


def test_the_bytes_are_those_that_the_graph_plans(small: Answers) -> None:
    """What some op reads in fp32 is gathered once per phase, in fp32; what is only read low is gathered low."""
    for rank in value(small, "profiled"):
        phases = [["both.weight", "torch.float32"], ["low.weight", "torch.bfloat16"]]
        wanted = [[phase, [name], dtype] for phase in ("forward", "backward") for name, dtype in phases]
        assert rank["gathers"] == wanted
        assert rank["sent"] == rank["planned"] == [8 * 8 * 4, 8 * 8 * 2] * 2


def test_all_ranks_skip_if_one_overflows(small: Answers) -> None:
    check_overflow(value(small, "overflow accumulated"))


def test_a_model_that_breaks_the_graph_is_refused(small: Answers) -> None:
    for told in value(small, "broken"):
        assert "graph_break" in told
        assert "fully_shard" in told


def check_again(found: list[Any]) -> None:
    for rank in found:
        assert rank["resumed"] == rank["going_on"]
        assert rank["plain"] in ([], rank["going_on"])
        assert rank["left"] == ["again", "plain"]  # nothing of a checkpoint is left under another name


def test_a_checkpoint_resumes_bit_for_bit(small: Answers) -> None:
    check_again(value(small, "again"))
    assert value(small, "again")[0]["plain"] != []


@pytest.mark.distributed
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_of_every_kind(everything: Answers, case: str) -> None:
    check_gradients(value(everything, case))


@pytest.mark.distributed
def test_low_reduction_is_close_to_the_wide_one(everything: Answers) -> None:
    for rank in value(everything, "sent in bf16"):
        assert rank["unequal"]
        assert rank["far"] == []


@pytest.mark.distributed
def test_clipping_goes_by_the_whole_norm(everything: Answers) -> None:
    for rank in value(everything, "clipped"):
        assert rank["clipped"]
        assert rank["far"] == []


@pytest.mark.distributed
def test_low_parameters_halve_the_traffic(everything: Answers) -> None:
    for rank in value(everything, "low only"):
        assert rank["O2"] <= 0.5 * rank["O0"]


@pytest.mark.distributed
def test_an_overflow_without_accumulation(everything: Answers) -> None:
    check_overflow(value(everything, "overflow"))


@pytest.mark.distributed
def test_a_deep_copy_goes_on_by_itself(everything: Answers) -> None:
    for rank in value(everything, "copied"):
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["same"]
        assert rank["apart"]


@pytest.mark.distributed
def test_the_model_can_be_called_while_it_is_gathered(everything: Answers) -> None:
    found = value(everything, "evaluated")
    for rank in found:
        assert rank["close"]
        assert rank["kinds"] == ["Parameter"]
        assert rank["after"] == ["DTensor"]
        assert rank["graphs"] == 1  # the step is not captured again


@pytest.mark.distributed
def test_frozen_parameters_and_an_optimizer_with_a_state(everything: Answers) -> None:
    for rank in value(everything, "frozen"):
        assert rank["kept"]
        assert rank["updated"] == [True, False, True]
        assert rank["unchanged"]
        assert rank["steps"] == 3
        assert rank["grad"]
        assert rank["rows"] == 8


@pytest.mark.distributed
def test_batches_of_other_sizes(everything: Answers) -> None:
    for rank in value(everything, "changing sizes"):
        assert rank["finite"]
        assert rank["graphs"] >= 2


@pytest.mark.distributed
def test_what_cannot_be_divided(everything: Answers) -> None:
    for told in value(everything, "refused"):
        assert "not a parameter of the model's modules" in told["a tensor of its own"]
        assert told["left"] == "Parameter"  # the model is as it was
        assert "cannot be in disable_passes" in told["a pass"]
        assert "wrapped in DistributedDataParallel" in told["DDP"]
        assert "is a DTensor" in told["fully_shard"]
        assert "is a DTensor" in told["data"]
        assert "Dynamo is switched off" in told["eager"]
        assert "sparse=False" in told["sparse"]


@pytest.mark.distributed
def test_ranks_that_differ_are_told_so(everything: Answers) -> None:
    for told in value(everything, "disagreement"):
        assert "level: rank 0 has O2; rank 1 has O1" in told


@pytest.mark.distributed
def test_two_steps_of_one_model(everything: Answers) -> None:
    first, second = value(everything, "one model, two steps")[0]
    assert second < first


@pytest.mark.distributed
def test_a_checkpoint_in_the_middle_of_an_update(everything: Answers) -> None:
    check_again(value(everything, "again in the middle of an update"))


@pytest.mark.distributed
def test_checkpoints_are_resumed_by_other_numbers_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved by four, resumed by four, by two, by one and, from two, by four. With as many ranks the sums are added in
    the same order, so the losses are equal to the bit; else they differ by the rounding of fp32 sums, which bf16 copies
    of the weights can turn into one rounding of a weight."""
    monkeypatch.setenv("AMP_TEST_FOLDER", str(tmp_path))
    by4 = results("cases_checkpoint", 4, ["save", "resume by as many"])
    going_on = value(by4, "save")[0]["losses"]
    assert value(by4, "resume by as many")[0]["losses"] == going_on
    by2 = results("cases_checkpoint", 2, ["resume by fewer", "save by two"])
    by1 = results("cases_checkpoint", 1, ["resume by one", "alone"])
    more = results("cases_checkpoint", 4, ["resume by more"])
    for losses in (value(by2, "resume by fewer"), value(by1, "alone"), value(more, "resume by more")):
        assert losses[0]["losses"] == pytest.approx(going_on, rel=1e-3)
    assert value(by1, "resume by one")[0]["losses"][0] < going_on[0]


@pytest.mark.parametrize("options", [{"reshard_after_forward": "yes"}, {"reduce_dtype": torch.int8}])
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        Sharded(**options)


def test_without_a_process_group() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"torch\.distributed is not initialized.*torchrun"):
        compile_train_step(model, torch.nn.functional.mse_loss, optimizer, parallel=Sharded())
    assert isinstance(model.weight, torch.nn.Parameter)
