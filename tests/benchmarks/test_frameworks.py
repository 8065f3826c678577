"""Workers in other interpreters: here they are this one, with a framework that is made up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmark_helpers import FOLDER, load

frameworks = load("frameworks")

WORKER = f"""
import sys, warnings
sys.path.insert(0, {str(FOLDER / "peers")!r})
from serve import serve

def make(variant, arrays):
    print("noise on stdout")
    open("left_behind", "w").close()
    if variant == "broken":
        raise TypeError("--------\\n- C++ Traceback\\nUnsupported data type!\\n")
    if variant == "idle":
        warnings.warn("mixed precision makes no effect here")
    state = [0.0]
    def step():
        state[0] += float(arrays["x"].sum())
        return state[0]
    return step

serve(make, ["fp32", "broken", "idle"], "1.2")
"""


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(frameworks, "PEERS", tmp_path)
    found = frameworks.examples(8, 4)[0]
    return frameworks.Example(**{**vars(found), "worker": "worker.py"})


def test_a_worker(example: object, tmp_path: Path) -> None:
    import numpy

    arrays = tmp_path / "arrays.npz"
    numpy.savez(arrays, x=numpy.ones(2))
    with frameworks.worker(example, sys.executable, arrays, 1) as (said, ask):
        assert said["version"] == "1.2"
        assert said["variants"] == ["fp32"]
        assert said["refused"] == {
            "broken": "TypeError: Unsupported data type!", "idle": "mixed precision makes no effect here",
        }  # fmt: skip
        seconds, loss = ask("fp32", 4)
        assert seconds > 0
        assert loss == 2.0 * (frameworks.WARM + 4)
    assert (tmp_path / "left_behind").exists()  # what a framework writes where it runs is not left in the repository


def test_a_worker_that_dies_says_why(example: object, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"the worker of paddle ended: .*nothing\.npz"),
        frameworks.worker(example, sys.executable, tmp_path / "nothing.npz", 1),
    ):
        pass


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.zoo)])
def test_all_start_from_the_same_weights(place: int) -> None:
    example = frameworks.examples(8, 4)[place]
    arrays = example.arrays()
    ours = frameworks.our_step(example, arrays, "O2", frameworks.DTYPES["bfloat16"])
    theirs = frameworks.torch_step(example, arrays, None)
    assert ours().item() == pytest.approx(theirs().item(), rel=2e-2)


@pytest.mark.parametrize("python", [None, "/no/such/python", sys.executable])
def test_what_is_not_installed(python: str | None) -> None:
    assert frameworks.installed(python, "no_such_framework") is None


def test_what_is_installed() -> None:
    assert frameworks.installed(sys.executable, "json") == sys.executable
