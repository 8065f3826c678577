"""The lists that are written down are the ones that this torch really has."""

from __future__ import annotations

import pytest
import torch

from amp_compiler.policy.ops.torch_lists import LISTS

KINDS = {"low", "fp32", "promote", "fp32_set_dtype", "banned"}
# Registered from a source file that only builds with cuDNN compile.
CUDNN_ONLY = {"_cudnn_rnn"}


def registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def listed(device: str) -> list[str]:
    return [name for names in LISTS[device].values() for name in names]


def test_each_device_has_every_kind() -> None:
    assert set(LISTS) == {"cpu", "cuda"}
    assert all(set(lists) == KINDS for lists in LISTS.values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_op_is_in_two_lists(device: str) -> None:
    assert len(listed(device)) == len(set(listed(device)))


def test_cpu_lists_are_the_dispatchers() -> None:
    assert set(listed("cpu")) == registered("AutocastCPU")


def test_cuda_lists_are_the_dispatchers() -> None:
    # A CPU build registers the CUDA kernels too, but for those of cuDNN.
    assert set(listed("cuda")) - CUDNN_ONLY == registered("AutocastCUDA") - CUDNN_ONLY
    assert set(listed("cuda")) >= CUDNN_ONLY


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_name_is_an_overload_of_an_aten_op(device: str) -> None:
    for name in listed(device):
        packet, _, overload = name.partition(".")
        assert (overload or "default") in getattr(torch.ops.aten, packet).overloads(), name


@pytest.mark.parametrize("name", sorted(LISTS["cuda"]["fp32_set_dtype"]))
def test_fp32_set_dtype_has_a_dtype_or_a_sibling_with_one(name: str) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(torch.ops.aten, packet)
    here = {a.name for a in getattr(op, overload or "default")._schema.arguments}
    siblings = {a.name for o in op.overloads() for a in getattr(op, o)._schema.arguments}
    assert "dtype" in (siblings if packet == "norm" else here)


# The kind of a few ops of each list, as autocast on this machine shows it.
X = torch.ones(4, 4)


def test_cpu_policies_show_in_results() -> None:
    low, full = torch.bfloat16, torch.float32
    with torch.autocast("cpu", dtype=low):
        assert torch.mm(X, X).dtype is low
        assert torch.nn.functional.mse_loss(X.to(low), X.to(low)).dtype is full
        assert torch.cat([X.to(low), X]).dtype is full
        assert torch.exp(X.to(low)).dtype is low  # in CUDA's list, not in the CPU's
