"""One run from end to end in its tiny form, and what happens where a variant cannot run or fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import steps
from harness import read
from subjects import SUBJECTS
from variants import INFERENCE, KINDS, TRAINING, Setting, Variant, cannot, is_compiled, peer_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "steps.py"
TINY = ["--tiny", "--rounds", "2", "--threads", "1"]
BF16 = torch.bfloat16


def test_a_run_in_a_process_of_its_own(tmp_path: Path) -> None:
    options = ["--subjects", "nine_256", "--kinds", "training", "--dtypes", "bfloat16", "--variants", "autocast", "O2"]
    command = [sys.executable, str(SCRIPT), *options, *TINY, "--out", str(tmp_path)]
    environment = {**os.environ, "AMP_CPU_KERNELS": "python", "AMP_VERIFY": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 160
    assert "nine_256 (tiny): training, bfloat16" in done.stdout
    found = read(tmp_path / "steps.json")
    assert [row.key["variant"] for row in found.rows] == ["fp32", "autocast", "O2"]
    assert all(len(row.samples["seconds"]) == 2 for row in found.rows)
    fp32, autocast, own = found.rows
    assert own.reference == fp32.key
    assert (fp32.counts["flops_low"], fp32.counts["flops_fp32"]) == (0, own.counts["flops_low"])
    assert own.counts["flops_fp32"] == 0
    assert own.counts["cast_bytes"] < autocast.counts["cast_bytes"]
    assert own.counts["saved_bytes"] < fp32.counts["saved_bytes"]
    ElementTree.parse(tmp_path / "steps.svg")
    assert (tmp_path / "steps.csv").read_text().startswith("subject,kind,dtype,variant,ops,")


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["steps.py", *TINY, "--out", str(folder), *options])
    return steps.main()


def raises(error: Exception) -> object:
    def make(*_: object) -> Variant:
        raise error

    return make


def test_a_variant_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def later(*_: object) -> Variant:
        calls = iter([None] * 4)
        return Variant(lambda: next(calls))

    monkeypatch.setitem(INFERENCE, "O1", raises(RuntimeError("first line\nsecond line")))
    monkeypatch.setitem(INFERENCE, "O3", later)
    options = ["--subjects", "nine_256", "--kinds", "inference", "--dtypes", "float16", "--no-counts"]
    assert run(monkeypatch, tmp_path, *options, "--variants", "O1", "O3", "model.to") == 1
    rows = {row.key["variant"]: row for row in read(tmp_path / "steps.json").rows}
    assert (rows["O1"].failed, rows["O1"].note) == (True, "RuntimeError: first line")
    assert rows["O3"].failed  # while it was timed
    assert rows["O3"].samples == {}
    assert len(rows["model.to"].samples["seconds"]) == 2


def test_what_a_peer_cannot_do_is_said_and_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive.")
    monkeypatch.setitem(TRAINING, "autocast", raises(error))
    options = ["--subjects", "lstm", "--kinds", "training", "--dtypes", "float16", "--no-counts"]
    assert run(monkeypatch, tmp_path, *options, "--variants", "autocast") == 0
    rows = {row.key["variant"]: row for row in read(tmp_path / "steps.json").rows}
    assert rows["autocast"].note == "oneDNN has no LSTM of this dtype here"
    assert cannot("O2", error) == ""  # ours has no excuse
    assert cannot("autocast", RuntimeError("something else")) == ""


def test_memory_of_one_variant_in_this_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = json.dumps(["nine_256", "inference", "bfloat16", "fp32"])
    monkeypatch.setattr(sys, "argv", ["steps.py", "--one", key, "--threads", "1"])
    assert steps.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["resident_bytes"] >= 0


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "hf_bert"])
def test_subjects_are_the_same_every_time_and_learn(name: str) -> None:
    """Tiny forms: the same weights and batch twice, whatever was drawn before; steps in fp32 lower the loss."""
    subject = SUBJECTS[name].tiny
    torch.manual_seed(5)
    first, ((x, y),) = subject.make(), subject.batches()
    torch.manual_seed(6)
    second, ((again, _),) = subject.make(), subject.batches()
    assert torch.equal(x, again)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    optimizer = torch.optim.SGD(first.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = subject.loss_fn(first(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]


@pytest.mark.parametrize("name", ["fp32", "autocast", "model.to", "O2"])
def test_accumulation_and_another_optimizer(name: str) -> None:
    """An update of two micro-batches changes the weights, in every way to train."""
    variant = TRAINING[name](SUBJECTS["nine_256"].tiny, Setting(BF16, "adamw", 2))
    variant.step()
    assert variant.saved is not None
    assert variant.saved() > 0


def test_every_variant_has_its_peer() -> None:
    for makers in KINDS.values():
        assert {peer_of(name) for name in makers} == {"autocast", "autocast+compile"} <= set(makers)
    assert [name for name in TRAINING if is_compiled(name)] == ["fp32+compile", "autocast+compile", "O2+inductor"]
