"""Parity with ``torch.autocast("cuda")``, the kernels, skipped steps, NCCL and conversion, on device ``cuda``: with
values on a GPU; on the stand-in for one, dtypes, shapes, devices, launches and that nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.attention_calls import CAPABILITIES, recorded, recorded_release
from gpu.chosen import ATTENTION, CONVERTED, PARITY, SHAPES
from gpu.harness import answer

from networks import NETWORKS

pytestmark = pytest.mark.gpu
LOW = ("fp16", "bf16")


@pytest.mark.parametrize("name", PARITY)
def test_outputs_and_gradients_are_autocasts(name: str) -> None:
    assert answer("cases_device", f"parity {name}") == []


@pytest.mark.zoo
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("low", LOW)
def test_every_network_is_as_under_autocast(network: str, low: str) -> None:
    assert answer("cases_device", f"parity {network} {low}") == []


@pytest.mark.parametrize("low", ["fp16", pytest.param("bf16", marks=pytest.mark.zoo)])
def test_updates_are_those_of_autocast_and_a_grad_scaler(low: str) -> None:
    assert answer("cases_device", f"scaler {low}") == []


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_as_its_definition_and_as_cublas(shape: str) -> None:
    found = answer("cases_device", f"product {shape} fp16")
    assert found["like"]
    assert found.get("exact", True)
    assert found.get("blas", True)
    assert found["launches"][:2] in (["matmul_kernel", "add_pieces_kernel"][: SHAPES[shape]], [])  # [] on a GPU


def test_gradients_are_unscaled_by_one_launch_per_dtype() -> None:
    found = answer("cases_device", "gradients")
    assert found["finite"] == ["torch.bool", "cuda"]
    assert found.get("values", True)
    assert found["launches"] in (["unscale_kernel"] * 3, [])


def test_a_product_that_the_library_computes_faster_is_left_to_it() -> None:
    few, many = (answer("cases_device", f"layer of {rows} rows") for rows in (16, 65536))
    assert few["kernels"] == ["1 × amp::cast_matmul: rounds an operand as it reads it"]
    assert few["launches"] in (["matmul_kernel"], [])
    assert many["launches"] == []
    (said,) = many["kernels"]
    assert "1 × addmm: left to the library: on " in said
    assert "(estimated)" in said


def test_a_step_is_skipped_without_waiting() -> None:
    found = answer("cases_device", "skip")
    assert found["skipped"] == ["torch.bool", "cuda"]
    assert found.get("kept", True)


def test_gradients_are_averaged_on_the_device() -> None:
    found = answer("cases_device", "data parallel")
    assert found["reduces"]
    assert found["elsewhere"] == found["cpu"] == found["refused"] == []


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_model_runs_there(name: str) -> None:
    _converted(answer("cases_device", f"convert {name}"))


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("lstm", "gru")])
def test_every_converted_model_runs_there(name: str) -> None:
    _converted(answer("cases_device", f"convert {name}"))


def _converted(found: dict[str, Any]) -> None:
    assert found["out"] == ["torch.float32", "cuda"]
    assert found.get("near", True)
    assert found["elsewhere"] == found["cpu"] == found["refused"] == []


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_gets_dtypes_that_its_kernel_takes(name: str) -> None:
    """A GPU may be another one than the name says; then the kernel is another one too."""
    found = answer("cases_device", f"attention {name}")
    kernel = f"_scaled_dot_product_{ATTENTION[name]}_attention"
    if not torch.cuda.is_available():
        assert found["kernels"] == [kernel, f"{kernel}_backward"]
    assert found["refused"] == []


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_stand_in_takes_the_attention_that_torchs_rules_for_cuda_take(capability: int) -> None:
    """The record has the answers of a CUDA build of torch, which was asked without a GPU (``ask_attention.py``)."""
    if torch.version.cuda is not None and not torch.__version__.startswith(f"{recorded_release()}."):
        pytest.skip(f"torch {torch.__version__} has rules of its own; the record is of torch {recorded_release()}")
    found, known = answer("cases_device", f"which attention {capability}"), recorded()
    for gpu in found.keys() & known.keys():
        assert found[gpu].keys() == known[gpu].keys()
        assert {call: kernel for call, kernel in found[gpu].items() if kernel != known[gpu][call]} == {}


@pytest.mark.zoo
def test_the_benchmark_times_every_variant() -> None:
    products, gradients, steps = 2 * 3, 2, 2 * 5
    assert answer("cases_device", "benchmark") == products + gradients + steps
