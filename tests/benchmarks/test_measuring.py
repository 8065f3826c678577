"""Counts and memory of steps whose numbers are known."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from amp_compiler import compile_train_step
from harness import count, in_fresh_process, peak_bytes, peak_resident, saved_by_autograd, saved_in_graph


def test_counts_of_a_linear_layer_under_autocast() -> None:
    """Two casts before the product and one after; the product is low, its operands 4 x 3 and 3 x 5."""
    x, w = torch.ones(4, 3), torch.ones(5, 3)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            nn.functional.linear(x, w).float()

    assert count(step).as_dict() == {
        "ops": 4, "casts": 3, "cast_bytes": 12 * 2 + 15 * 2 + 20 * 4, "inside_casts": 0, "inside_bytes": 0,
        "flops_low": 120, "flops_fp32": 0,
    }  # fmt: skip


def test_peak_counts_what_is_held_at_one_time() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        first = torch.empty(1 << 16)
        second = torch.empty(1 << 16)
        del first
        kept[:] = [torch.empty(1 << 15)]
        del second

    step()
    assert peak_bytes(step) == (2 << 18) + (1 << 17)  # what the first step kept is still there


def test_saved_for_backward_without_parameters_and_batch() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(3, 4)
    assert saved_by_autograd(lambda: model(x).sum(), model, [x]) == 3 * 8 * 4  # relu's result, once


def test_saved_in_a_joint_graph_is_what_autograd_saves_in_fp32() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(3, 4), torch.ones(3, 2)
    step = compile_train_step(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), "O0", loss_scaler=None
    )
    assert saved_in_graph(step) == 0  # nothing is captured yet
    step(x, y)
    assert saved_in_graph(step) == saved_by_autograd(lambda: nn.functional.mse_loss(model(x), y), model, [x, y])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_resident_memory_rises_by_what_is_written() -> None:
    size = 1 << 27
    rise = peak_resident(lambda: bytearray(b"x") * size)
    assert 0.9 * size < rise < 1.5 * size


def test_a_fresh_process_answers_by_its_last_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('words')\nprint('{\"n\":', sys.argv[1], '}')\n")
    assert in_fresh_process(script, ["3"]) == {"n": 3}
    script.write_text("raise SystemExit('no such thing')\n")
    with pytest.raises(RuntimeError, match=r"script\.py --one ended with 1: no such thing"):
        in_fresh_process(script, ["--one"])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such option")
@pytest.mark.parametrize("keeps", [False, True])
def test_kept_memory_costs_page_faults_once(keeps: bool) -> None:
    """In a process of its own: the option stays. By default, glibc gives blocks of 40 MiB back whatever happened
    before: it never takes more than 32 MiB for small."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "benchmarks")!r})
import torch
from harness import keep_freed_memory
if {keeps}:
    keep_freed_memory()
found = []
for _ in range(21):  # now and then something else takes a part of the block, and another one is taken
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10 << 20)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(found)[10])
"""
    faults = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert (faults < 10) is keeps  # a page has 4 KiB, or 2 MiB, of which a block has twenty
