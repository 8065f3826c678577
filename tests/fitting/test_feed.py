"""``Feed``: a run that stops anywhere finds the same batches again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from amp_compiler.fitting.feed import Feed, random_state, set_random_state

KINDS = ("list", "shuffled", "generator", "replacement", "iterator")
DEVICE = torch.device("cpu")


def loader(kind: str, batches: int) -> Any:
    data = TensorDataset(torch.arange(3.0 * batches))
    if kind == "list":
        return list(torch.arange(float(batches)))
    if kind == "iterator":
        return iter(torch.arange(99.0))
    generator = None if kind == "shuffled" else torch.Generator().manual_seed(5)
    if kind == "replacement":
        sampler = torch.utils.data.RandomSampler(data, replacement=True, generator=generator)
        return DataLoader(data, 3, sampler=sampler)
    return DataLoader(data, 3, shuffle=True, generator=generator)


def steps(feed: Feed, epochs: range) -> Iterator[tuple[int, list[float], float]]:
    """Every batch of the epochs, and what a model would draw for it: the same generator shuffles."""
    for number in epochs:
        for inputs, _ in feed.epoch(number):
            draw = float(torch.rand(())) + random.random() + float(numpy.random.rand())
            yield number, torch.as_tensor(inputs).flatten().tolist(), draw


@settings(max_examples=60)
@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 3), st.data())
def test_the_rest_of_a_run_is_the_same_from_every_place(kind: str, batches: int, epochs: int, data: Any) -> None:
    per_epoch = data.draw(st.integers(1, batches), label="steps")
    stop = data.draw(st.integers(1, per_epoch * epochs), label="stop")
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    feed = Feed(loader(kind, batches), per_epoch, DEVICE)
    run = steps(feed, range(epochs))
    before = list(itertools.islice(run, stop))
    number = before[-1][0]
    saved = feed.state(between=False)
    rest = list(run)
    assert len(before) + len(rest) == per_epoch * epochs
    torch.rand(3)
    random.random()
    again = Feed(loader(kind, batches), per_epoch, DEVICE)
    again.restore(saved, number)
    assert (again.done, again.taken) == (stop - number * per_epoch, stop)
    assert list(steps(again, range(number, epochs))) == rest


def test_generators_are_told_apart() -> None:
    given = DataLoader(TensorDataset(torch.arange(4.0)), shuffle=True, generator=torch.Generator().manual_seed(1))
    state = random_state(given)
    assert len(state["generators"]) == 1  # the loader and its sampler share it
    first = [float(x) for (x,) in given], random.random(), float(numpy.random.rand()), float(torch.rand(()))
    set_random_state(state, given)
    assert ([float(x) for (x,) in given], random.random(), float(numpy.random.rand()), float(torch.rand(()))) == first


@pytest.mark.parametrize("place", ["loader", "sampler", "batch_sampler"])
def test_a_sampler_is_told_the_epoch(place: str) -> None:
    class Told(list[Any]):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.epochs: list[int] = []

        def set_epoch(self, number: int) -> None:
            self.epochs.append(number)

    told = Told([torch.zeros(1)])
    given: Any = told
    if place != "loader":
        given = type("Loader", (list,), {place: told})([torch.zeros(1)])
    feed = Feed(given, None, DEVICE)
    for number in (0, 1):
        list(feed.epoch(number))
    assert told.epochs == [0, 1]


def test_only_what_is_elsewhere_is_moved() -> None:
    x = torch.ones(2)
    ((inputs, targets),) = Feed([({"x": x, "n": 3}, [x])], None, DEVICE).epoch(0)
    assert inputs["x"] is x
    assert inputs["n"] == 3
    assert targets[0] is x
    ((inputs, targets),) = Feed([(x, x)], None, torch.device("meta")).epoch(0)
    assert inputs.is_meta
    assert targets.is_meta
