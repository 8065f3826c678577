"""The file of a run: a run that is continued from it ends in the same bits, and a bad file changes nothing."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, Dataset

from amp_compiler import AmpWarning, CheckpointError, History, Sharded, fit
from training_helpers import batches, differences, state

BATCHES, EPOCHS = 5, 2


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws noise from every generator that a data set in this process may use."""

    def __init__(self) -> None:
        self.x, self.y = batches(1, (2 * BATCHES, 4), (2 * BATCHES, 2))[0]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = float(torch.rand(())) + random.random() + numpy.random.rand()
        return self.x[index] + 0.1 * noise, self.y[index]


class Counting:
    """A loader with a state of its own, which nobody has to run through again."""

    def __init__(self) -> None:
        self.data, self.start, self.place, self.given = batches(BATCHES, (2, 4), (2, 2)), 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        for place in range(self.start, BATCHES):
            self.place, self.given = place + 1, self.given + 1
            yield self.data[place]
        self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"] % BATCHES


def endless() -> Iterator[Any]:
    source = torch.Generator().manual_seed(4)
    while True:
        yield torch.randn(2, 4, generator=source), torch.randn(2, 2, generator=source)


def shuffled(generator: torch.Generator | None) -> Any:
    return DataLoader(Noisy(), 2, shuffle=True, generator=generator)


LOADERS: dict[str, Any] = {
    "shuffled": lambda: shuffled(None),
    "generator": lambda: shuffled(torch.Generator().manual_seed(8)),
    "own state": Counting,
    "iterator": endless,
}


class Trained:
    """A new model, optimizer and scheduler, as of a new process, and the run of them."""

    def __init__(self, loader: Any, **options: Any) -> None:
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = MultiStepLR(self.optimizer, [2, 4])
        options = {"epochs": EPOCHS, "accumulate_steps": 2, "scheduler": self.scheduler, **options}
        self.history: History = fit(self.model, F.mse_loss, self.optimizer, loader, level="O0", **options)

    def state(self) -> dict[str, Any]:
        found = state(self.model, self.optimizer)
        return {**found, "lr": self.optimizer.param_groups[0]["lr"], "draw": float(torch.rand(()))}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every file that a run writes is kept as 1.pt, 2.pt and so on."""
    from amp_compiler.fitting import saved

    write, folder = saved.save, tmp_path / "all"
    folder.mkdir()

    def keep(path: Any, given: Any) -> bool:
        done = write(path, given)
        shutil.copy(path, folder / f"{len(list(folder.iterdir())) + 1}.pt")
        return done

    monkeypatch.setattr(saved, "save", keep)
    return folder


@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_continues_bit_for_bit(kind: str, tmp_path: Path, files: Path) -> None:
    """From the middle of an update, of an epoch (before its flush too), and between two epochs."""
    path = tmp_path / "run.pt"
    steps = BATCHES if kind == "iterator" else None
    whole = Trained(LOADERS[kind](), checkpoint=path, save_every_steps=1, steps=steps)
    end = whole.state()
    assert len(list(files.iterdir())) == EPOCHS * (BATCHES + 1)
    places = {"shuffled": (3, 5, 6, 9), "generator": (3, 6)}.get(kind, (3, 8))
    for place in places:
        loader = LOADERS[kind]()
        again = Trained(loader, resume=files / f"{place}.pt", steps=steps)
        assert differences(again.state(), end) == [], place
        for mine, other in zip(again.history, whole.history, strict=True):
            assert (mine.loss, mine.updates, mine.batches) == (other.loss, other.updates, other.batches)
    if kind == "own state":
        assert loader.given == 2 * BATCHES - 7  # it had no batch to drop


def test_a_run_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    data = batches(2, (2, 4), (2, 2))
    done = Trained(data, checkpoint=tmp_path / "run.pt", resume=True, epochs=1)  # there is no file yet
    end = done.state()
    again = Trained(data, checkpoint=tmp_path / "run.pt", resume=True, epochs=1)
    assert again.history == done.history
    assert differences(again.state(), end) == []
    assert len(Trained(data, checkpoint=tmp_path / "run.pt", resume=True, epochs=2).history) == 2


def test_ctrl_c_keeps_the_run(tmp_path: Path) -> None:
    def loader(interrupts: bool) -> Iterator[Any]:
        for number, batch in enumerate(endless(), 1):
            if interrupts and number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    path = tmp_path / "run.pt"
    end = Trained(loader(False), steps=BATCHES).state()
    assert Trained(loader(True), steps=BATCHES, checkpoint=path).history.interrupted
    assert differences(Trained(loader(False), steps=BATCHES, resume=path).state(), end) == []


def test_the_file_is_written_at_the_epochs_that_were_asked_for(tmp_path: Path, files: Path) -> None:
    data = batches(2, (2, 4), (2, 2))
    Trained(data, checkpoint=tmp_path / "run.pt", epochs=5, save_every_epochs=2)
    saved = [torch.load(files / f"{number}.pt") for number in (1, 2, 3)]
    assert [len(given["epochs"]) for given in saved] == [2, 4, 5]
    assert len(list(files.iterdir())) == 3


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond 100 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    data, path = batches(2, (2, 4), (2, 2)), tmp_path / "run.pt"
    Trained(data, checkpoint=path, epochs=1)
    before = path.read_bytes()
    with full_disk(), pytest.warns(AmpWarning, match=r"could not be written.*run goes on.*run\.pt is unchanged"):
        history = Trained(data, checkpoint=path, epochs=2).history
    assert len(history) == 2
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.pt"]


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


def of_a_step(path: Path) -> None:
    torch.save(torch.load(path)["step"], path)


def of_the_future(path: Path) -> None:
    torch.save({**torch.load(path), "version": 9}, path)


def incomplete(path: Path) -> None:
    torch.save({**torch.load(path), "feed": None}, path)


def of_another_model(path: Path) -> None:
    given = torch.load(path)
    given["step"]["model"]["0.weight"] = torch.zeros(3, 3)
    torch.save(given, path)


def without_scheduler(path: Path) -> None:
    torch.save({**torch.load(path), "scheduler": None}, path)


def further_on(path: Path) -> None:
    given = torch.load(path)
    given["feed"]["done"] = 7
    torch.save(given, path)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (damaged, "is damaged or is not a checkpoint of fit"),
        (of_a_step, r"is not a checkpoint of fit\(\): pass a file that fit"),
        (of_the_future, "has the version 9; this release reads 1"),
        (incomplete, "is damaged: feed is missing"),
        (of_another_model, "model.0.weight should be"),
        (without_scheduler, "This run has a scheduler, and the checkpoint has none. Nothing was changed."),
        (further_on, "fewer batches than the 7 that the checkpoint has used"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
    ],
    ids=["damaged", "of a step", "future", "incomplete", "another model", "no scheduler", "further on", "none"],
)
def test_a_file_that_does_not_fit_changes_nothing(spoil: Any, told: str, tmp_path: Path, one_file: bytes) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(one_file)
    spoil(path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = MultiStepLR(optimizer, [2, 4])
    before, rate, draws = state(model, optimizer), scheduler.state_dict(), torch.get_rng_state()
    with pytest.raises((CheckpointError, ValueError), match=told):
        fit(model, F.mse_loss, optimizer, batches(2, (2, 4), (2, 2)), level="O0", scheduler=scheduler, resume=path)
    assert differences(state(model, optimizer), before) == []
    assert scheduler.state_dict() == rate
    assert torch.equal(torch.get_rng_state(), draws)


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("run") / "run.pt"
    Trained(batches(2, (2, 4), (2, 2)), checkpoint=path, epochs=1, accumulate_steps=1)
    return path.read_bytes()


def test_a_path_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="there is no folder"):
        fit(model, F.mse_loss, optimizer, batches(1, (2, 4), (2, 2)), checkpoint=tmp_path / "no" / "run.pt")
    with pytest.raises(ValueError, match=r"torch\.distributed\.checkpoint"):
        fit(model, F.mse_loss, optimizer, [], checkpoint=tmp_path / "run.pt", parallel=Sharded())
