"""``amp-compiler plan``: what many processes will hold and send, read off a graph that nobody runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.harness import results, value
from torch import nn

from amp_compiler import ArgumentError, Policy
from amp_compiler.parallel.plan import Plan, plan

O2 = Policy("O2", torch.bfloat16)


def network(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 8))


@functools.cache
def of_four() -> Plan:
    """The plan that several tests look at."""
    return planned()


def planned(model: nn.Module | None = None, **options: Any) -> Plan:
    x = torch.empty(4, 64)
    return plan(model or network(), (x,), None, **{"policy": O2, "ranks": 4, **options})


def sent(found: Plan, title: str) -> dict[str, int]:
    (column,) = [c for c in found.columns if c.title == title]
    return {f"{t.kind} {t.dtype}": t.bytes for t in column.traffic}


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_data_parallel_averages_every_gradient_once() -> None:
    found = planned(parallel="data")
    assert sent(found, "O2 bfloat16") == sent(found, "fp32") == {"all-reduce float32": 4 * numel(network())}
    ours, _ = found.columns
    assert ours.parameters == ours.gradients == 4 * numel(network())
    assert ours.optimizer == 8 * numel(network())


def test_sharded_divides_everything_that_is_kept() -> None:
    for column in of_four().columns:
        assert column.parameters == column.gradients == numel(network())  # 4 bytes, a quarter each
        assert column.optimizer == 2 * numel(network())


def test_masters_of_low_parameters_count() -> None:
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    ours, _ = plan(nn.Linear(8, 4).bfloat16(), (x,), None, policy=O2, ranks=2, parallel="data").columns
    numbers = 8 * 4 + 4
    assert (ours.parameters, ours.gradients, ours.optimizer) == (2 * numbers, 4 * numbers, (8 + 4) * numbers)


def test_parameters_that_are_read_low_are_gathered_low() -> None:
    found = of_four()
    linears = numel(network()) - 2 * 64
    ours, fp32 = sent(found, "O2 bfloat16"), sent(found, "fp32")
    first = network()[0].weight.numel()  # type: ignore[index]  # the backward does not read it: its input needs no gradient
    biases = 64 + 8  # nor does it read these
    assert ours["all-gather bfloat16"] == 2 * (2 * linears - first - biases)
    assert ours["all-gather float32"] == 4 * 2 * 128  # the norm's weight and bias, for its forward and its backward
    assert fp32["all-gather float32"] == 2 * ours["all-gather bfloat16"] + ours["all-gather float32"]
    assert ours["reduce-scatter float32"] == fp32["reduce-scatter float32"] == 4 * numel(network())


def test_kept_parameters_are_gathered_once() -> None:
    once, twice = planned(reshard_after_forward=False), of_four()
    assert sent(once, "O2 bfloat16")["all-gather bfloat16"] == 2 * (numel(network()) - 128)
    assert sent(once, "O2 bfloat16")["all-gather bfloat16"] < sent(twice, "O2 bfloat16")["all-gather bfloat16"]


@settings(max_examples=8, deadline=None)
@given(ranks=st.integers(1, 2000), width=st.integers(1, 70))
def test_any_number_of_ranks_and_rows(ranks: int, width: int) -> None:
    """The first rank holds a full chunk of every parameter; what is sent covers every parameter, padding included."""
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 3))
    found = planned(model, ranks=ranks)
    chunks = sum(-(-p.shape[0] // ranks) * p[0].numel() for p in model.parameters())
    assert found.columns[0].parameters == 4 * chunks
    assert sent(found, "O2 bfloat16")["reduce-scatter float32"] == 4 * chunks * ranks


def test_more_ranks_need_less_memory() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    peaks = [planned(model, ranks=ranks).columns[0].peak for ranks in (1, 2, 8)]
    assert peaks == sorted(peaks, key=lambda p: -(p or 0))


def test_a_model_without_weights() -> None:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=128, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.zeros(1, 16, dtype=torch.long)
    found = plan(model, (), {"input_ids": ids, "labels": ids}, policy=O2, ranks=1024)
    ours = found.columns[0]
    assert ours.activations
    assert sum(t.bytes for t in ours.traffic) < sum(t.bytes for t in found.columns[1].traffic)
    assert found.to_json()["columns"][0]["collectives"]
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ranks": 0}, "at least 1"), ({"ranks": True}, "at least 1"), ({"parallel": "pipeline"}, "data, sharded"),
        ({"optimizer": "adam"}, "adamw, momentum|sgd, momentum, adamw"),
    ],
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        planned(**options)


def test_nothing_to_train() -> None:
    with pytest.raises(ArgumentError, match="nothing to train"):
        planned(network().requires_grad_(False))


@pytest.mark.distributed
def test_a_run_sends_what_was_planned() -> None:
    for rank in value(results("cases_plan", 2, ("data", "sharded", "kept")), "sharded"):
        assert rank["run"] == rank["planned"]


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["data", "kept"])
def test_a_run_of_another_kind_too(case: str) -> None:
    for rank in value(results("cases_plan", 2, ("data", "sharded", "kept")), case):
        assert rank["run"] == rank["planned"]
