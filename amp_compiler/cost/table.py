"""The devices that are known by name, from their vendors' data sheets. Rows, no logic.

Rates are dense TFLOP/s: of ordinary units for fp32, of matrix units with fp32 accumulation for the others (a data sheet
that tells rates with sparsity was halved); None where a device has no such units. Bandwidths are in GB/s, of a link in
one direction; memory is in GB.
"""

from __future__ import annotations

from .device import HOST_2018_MICROSECONDS as OLDER
from .device import Device, row

DEVICES: dict[str, Device] = {device.name: device for device in (
    row("v100_sxm2", "NVIDIA V100 SXM2", fp32=15.7, tf32=None, fp16=125, bf16=None, bandwidth=900, sms=80, memory=32,
        link=150, host=OLDER, source="NVIDIA V100 data sheet (January 2020)"),
    row("v100_pcie", "NVIDIA V100 PCIe", fp32=14.0, tf32=None, fp16=112, bf16=None, bandwidth=900, sms=80, memory=32,
        link=16, host=OLDER, source="NVIDIA V100 data sheet (January 2020)"),
    row("t4", "NVIDIA T4", fp32=8.1, tf32=None, fp16=65, bf16=None, bandwidth=320, sms=40, memory=16,
        link=16, host=OLDER, source="NVIDIA T4 product brief; bandwidth: Turing architecture white paper"),
    row("a10", "NVIDIA A10", fp32=31.2, tf32=62.5, fp16=125, bf16=125, bandwidth=600, sms=72, memory=24,
        link=32, source="NVIDIA A10 data sheet"),
    row("l4", "NVIDIA L4", fp32=30.3, tf32=60, fp16=121, bf16=121, bandwidth=300, sms=58, memory=24,
        link=32, source="NVIDIA L4 data sheet (rates with sparsity, halved)"),
    row("a100_40", "NVIDIA A100 SXM 40 GB", fp32=19.5, tf32=156, fp16=312, bf16=312, bandwidth=1555, sms=108,
        memory=40, link=300, source="NVIDIA A100 data sheet; A100 architecture white paper"),
    row("a100_80", "NVIDIA A100 SXM 80 GB", fp32=19.5, tf32=156, fp16=312, bf16=312, bandwidth=2039, sms=108,
        memory=80, link=300, source="NVIDIA A100 data sheet; A100 architecture white paper"),
    row("h100_sxm", "NVIDIA H100 SXM", fp32=67, tf32=494.7, fp16=989.4, bf16=989.4, bandwidth=3350, sms=132,
        memory=80, link=450, source="NVIDIA H100 data sheet (rates with sparsity, halved)"),
    row("h100_pcie", "NVIDIA H100 PCIe", fp32=51, tf32=378, fp16=756, bf16=756, bandwidth=2000, sms=114,
        memory=80, link=64, source="NVIDIA H100 data sheet (rates with sparsity, halved)"),
    row("h200", "NVIDIA H200 SXM", fp32=67, tf32=494.7, fp16=989.4, bf16=989.4, bandwidth=4800, sms=132,
        memory=141, link=450, source="NVIDIA H200 data sheet (rates with sparsity, halved)"),
    row("b200", "NVIDIA B200", fp32=75, tf32=1100, fp16=2250, bf16=2250, bandwidth=8000, sms=148,
        memory=180, link=900, source="NVIDIA HGX B200 data sheet, one of eight (rates with sparsity, halved)"),
    row("rtx3090", "NVIDIA RTX 3090", fp32=35.6, tf32=35.6, fp16=71, bf16=71, bandwidth=936, sms=82,
        memory=24, link=32, source="NVIDIA GA102 architecture white paper (fp32 accumulation)"),
    row("rtx4090", "NVIDIA RTX 4090", fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, bandwidth=1008, sms=128,
        memory=24, link=32, source="NVIDIA Ada architecture white paper (fp32 accumulation)"),
    row("mi250x", "AMD MI250X, both dies", fp32=47.9, tf32=None, fp16=383, bf16=383, bandwidth=3277, sms=220,
        memory=128, link=50, source="AMD MI250X data sheet"),
    row("mi300x", "AMD MI300X", fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, bandwidth=5300, sms=304,
        memory=192, link=64, source="AMD MI300X data sheet"),
)}  # fmt: skip
