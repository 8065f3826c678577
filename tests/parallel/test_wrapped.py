"""Models in wrappers of ``torch.distributed``, on two gloo ranks: every op as in the model alone."""

from __future__ import annotations

from typing import Any

import pytest
from parallel.cases_wrapped import CASES
from parallel.diagonal import DIAGONAL
from parallel.harness import results, value

#: a case of each kind; the rest is marked ``distributed``
SMALL = DIAGONAL["cases_wrapped"]
REST = tuple(name for name in CASES if name not in SMALL)


def cases(*kinds: str) -> list[Any]:
    """The names that begin with one of these words, those beyond the diagonal marked."""
    chosen = [name for name in CASES if name.split()[0] in kinds]
    return [name if name in SMALL else pytest.param(name, marks=pytest.mark.distributed) for name in chosen]


def found(name: str) -> list[Any]:
    """What a case gave in each rank."""
    return value(results("cases_wrapped", 2, SMALL if name in SMALL else REST), name)


@pytest.mark.parametrize("name", cases("forward", "step", "tensor"))
def test_precision_is_that_of_the_model_alone(name: str) -> None:
    for rank in found(name):
        if "BERT" in name and "with a policy" in name:
            # A lookup moves values of a weight that is gathered low: fp32 would be a wide copy of the whole table.
            assert sorted(rank["differing"]) == sorted(
                f"only {where}: embedding in bert.embeddings.{which}_embeddings: {precision}"
                for which in ("word", "position", "token_type")
                for where, precision in (("wrapped", "bfloat16"), ("plain", "float32"))
            )
            continue
        wrapped, alone = rank["precision"]
        assert wrapped == alone
        assert rank["differing"] == []


@pytest.mark.parametrize("name", cases("forward", "step", "tensor"))
def test_everything_is_captured_and_nothing_warned_of(name: str) -> None:
    for rank in found(name):
        assert rank["not captured"] == []
        assert rank["warnings"] == []


@pytest.mark.parametrize("name", cases("forward", "step"))
def test_gradients_are_the_mean_of_single_processes(name: str) -> None:
    for rank in found(name):
        if "residual" in name:
            # A value that is read inside and outside of a unit: its three gradients are added in another order.
            assert 0 < rank["off"] < 2**-6
        elif "BERT" in name and "with a policy" in name:
            # Torch adds up the gradient of a low table in its dtype: one rounding for each of the 30 words of a batch.
            tables = ("bert.embeddings.word_embeddings.weight", "bert.embeddings.token_type_embeddings.weight")
            assert set(rank["unequal"]) <= set(tables)
            assert all(off < 30 * 2**-9 for off in rank["unequal"].values())
        else:
            assert rank["unequal"] == {}


@pytest.mark.parametrize("name", cases("forward"))
def test_outputs_keep_their_dtypes_and_parameters_stay_sharded(name: str) -> None:
    for rank in found(name):
        assert rank["dtype"] == "torch.float32"
        assert rank["sharded"]


@pytest.mark.parametrize("name", cases("step"))
def test_steps_update_and_say_how_they_run(name: str) -> None:
    ranks = found(name)
    assert ranks[0]["norm"] == ranks[1]["norm"]
    for rank in ranks:
        assert rank["updated"]
        assert rank["loss"][0] == rank["loss"][1]
        assert any("the training step is not one graph" in note for note in rank["notes"])
        if "FSDP2" in name:
            assert any("fully_shard made" in note for note in rank["notes"])


@pytest.mark.parametrize("name", cases("overflow"))
def test_all_ranks_skip_if_one_overflows(name: str) -> None:
    for rank in found(name):
        assert rank["skipped"]
        assert rank["changed"] == []
        assert rank["scale"] == 2.0**15
        assert rank["updated"]


@pytest.mark.distributed
def test_an_overflow_of_a_divided_model_is_explained() -> None:
    for rank in found("explain tensor"):
        assert rank["skipped"]
        assert rank["phase"] in ("forward", "backward"), rank["told"]
        assert rank["module"], rank["told"]


@pytest.mark.parametrize("name", cases("low"))
def test_outputs_stay_low_if_asked_for(name: str) -> None:
    for rank in found(name):
        assert rank == {"Sequential": "torch.bfloat16", "class": "torch.bfloat16"}


@pytest.mark.parametrize("name", cases("freed"))
def test_no_low_copy_of_a_parameter_waits_for_the_backward(name: str) -> None:
    for rank in found(name):
        assert rank["kept"]
        assert rank["low copies"] == []


def test_kernels_take_shards_beside_plain_gradients() -> None:
    for number, rank in enumerate(found("shards")):
        assert rank["found"] == 1.0, f"rank {number}"
        assert rank["finite"] == [True, False]
        assert (rank["local"], rank["plain"]) == (2.0, 4.0)
        assert rank["norm"] == pytest.approx(109**0.5, rel=1e-6)


@pytest.mark.parametrize("name", cases("tensor"))
def test_tensor_parallel_is_within_a_rounding(name: str) -> None:
    """Each rank rounds its part of a sum, and the sum of the parts is rounded again: twice the model's own rounding."""
    rounding = 2**-7 if "bfloat16" in name else 2**-10
    ranks = found(name)
    for rank in ranks:
        assert rank["off"] < 2 * rounding
        assert rank["output"] < 2 * rounding
        assert rank["losses"][-1] < rank["losses"][0]
    if "Sequence" not in name:  # else each rank has a part of the sequence
        assert ranks[0]["losses"] == ranks[1]["losses"]
