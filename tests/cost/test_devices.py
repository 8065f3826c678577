"""Devices by name and from files."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_compiler import ArgumentError
from amp_compiler.cost import machine
from amp_compiler.cost.devices import Device, find
from amp_compiler.cost.machine import known_gpu, this_machine
from amp_compiler.cost.table import DEVICES

FILE = 'title = "AMD MI210"\nsource = "data sheet"\nfp32 = 22.6\nfp16 = 181\nbandwidth = 1638\nsms = 104\n'


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_row_is_plausible(device: Device) -> None:
    assert device.source
    assert 1e12 < device.peak["fp32"] <= max(device.peak.values()) < 1e16
    assert 1e11 < device.bandwidth < 1e13
    assert device.link < device.bandwidth
    assert 10 <= device.sms <= 400
    assert device.memory >= 16e9
    low = device.peak["fp16"]
    assert low == device.peak.get("bf16", low)
    assert device.peak.get("tf32", low / 2) <= low / 2 * 1.05


def test_a_device_by_any_spelling() -> None:
    assert find("A100-80") is find("a100_80") is find(find("a100_80"))


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"Unknown device 'a100_90'\. Did you mean 'a100_80'") as error:
        find("a100_90")
    assert "this_machine" in error.value.hint


def test_units() -> None:
    v100, a100 = find("v100_sxm2"), find("a100_80")
    assert [v100.unit(d) for d in (torch.float32, torch.float16, torch.bfloat16)] == ["fp32", "fp16", "fp32"]
    assert a100.unit(torch.float32) == "tf32"
    assert a100.unit(torch.float32, tf32=False) == "fp32"


def test_a_device_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mi210.toml"
    path.write_text(FILE)
    found = find(str(path))
    assert (found.name, found.title, found.source) == ("mi210", "AMD MI210", "data sheet")
    assert found.peak == {"fp32": 22.6e12, "fp16": 181e12}
    assert (found.bandwidth, found.sms) == (1638e9, 104)
    assert find(path) == found


@pytest.mark.parametrize(("change", "message"), [
    (("bandwidth = 1638\n", ""), "lacks 'bandwidth'"),
    (("sms = 104", "sms = -1"), "sms = -1 multiprocessors cannot be right"),
    (("fp16 = 181", "fp16 = 181e12"), "fp16 = 1.81e\\+14 TFLOP/s cannot be right"),
    (("fp16 = 181", "fp16 = nan"), "fp16 = nan TFLOP/s cannot be right"),
    (("fp16 = 181", "fp16 = true"), "fp16 is True, not a number"),
    (("fp16 = 181", "fp17 = 181"), "unknown key 'fp17'. Did you mean 'fp16'"),
    (("fp16 = 181", "fp16 ="), "is not TOML"),
])  # fmt: skip
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "mi210.toml"
    path.write_text(FILE.replace(*change))
    with pytest.raises(ArgumentError, match=message):
        find(str(path))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ArgumentError, match=r"none\.toml cannot be read: No such file"):
        find("none.toml")


@given(st.dictionaries(st.sampled_from(["fp32", "fp16", "bandwidth", "sms"]), st.floats(), min_size=4))
def test_a_file_gives_a_usable_device_or_an_error(figures: dict[str, float]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "d.toml")
        path.write_text("".join(f"{key} = {value!r}\n" for key, value in figures.items()))
        try:
            found = find(path)
        except ArgumentError:
            return
    values = (*found.peak.values(), found.bandwidth, found.memory, found.link, float(found.sms))
    assert all(math.isfinite(value) and value > 0 for value in values)


# ------------------------------------------------------------------------------------------------ this machine


def test_this_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_CACHE_DIR", str(tmp_path))
    calls = []

    def measured(native: bool = False) -> machine.Figures:
        calls.append(native)
        return machine.Figures(machine._key(), {"fp32": 1e11, "bf16": 2e11}, 5e10, 2e-6)

    monkeypatch.setattr(machine, "measure", measured)
    first = this_machine()
    assert find("this_machine") == first
    assert calls == [False]
    assert (first.peak["bf16"], first.is_cpu, first.launch, first.host) == (2e11, True, 2e-6, 0.0)
    this_machine(again=True)
    assert len(calls) == 2


@pytest.mark.parametrize("text", ["", "{", "{}", '{"key": "other", "peak": {}, "bandwidth": 1, "overhead": 1}'])
def test_a_kept_file_that_is_not_of_this_machine(tmp_path: Path, text: str) -> None:
    path = tmp_path / "this_machine.json"
    path.write_text(text)
    assert machine._read(path) is None


@pytest.mark.slow  # a few seconds of kernels in every dtype
def test_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_REPEATS", 1)
    found = machine.measure(native=True)
    assert set(found.peak) == {f"{u}{k}" for u in ("fp32", "fp16", "bf16") for k in ("", ":convolution", ":attention")}
    assert all(value > 0 for value in (*found.peak.values(), found.bandwidth, found.overhead))


@pytest.mark.parametrize(("name", "gigabytes", "known"), [
    ("NVIDIA A100-SXM4-80GB", 85, "a100_80"),
    ("NVIDIA A100-SXM4-40GB", 42, "a100_40"),
    ("Tesla V100-SXM2-16GB", 17, "v100_sxm2"),
    ("Tesla V100-PCIE-32GB", 34, "v100_pcie"),
    ("Tesla T4", 16, "t4"),
    ("NVIDIA H100 80GB HBM3", 85, None),
    ("NVIDIA H100 PCIe", 85, "h100_pcie"),
    ("NVIDIA GeForce RTX 4090", 25, "rtx4090"),
    ("Quadro K620", 2, None),
])  # fmt: skip
def test_gpus_by_the_name_that_cuda_gives(name: str, gigabytes: int, known: str | None) -> None:
    found = known_gpu(name, gigabytes * 10**9)
    assert (found.name if found else None) == known


def test_a_device_is_a_value() -> None:
    device = find("t4")
    assert hash(device) == hash(dataclasses.replace(device))
