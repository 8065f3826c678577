"""Real architectures converted at O2: near to fp32, half the size, the heavy ops low, the same from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_compiler import convert_model, load_converted
from conversion_helpers import floats, snr
from helpers import BF16, LOW
from image_networks import IMAGES
from zoo.models import ZOO

#: what a converted model must reach: 8 and 11 bits of mantissa give 50 and 68 dB for one rounding
SNR = {torch.bfloat16: 30.0, torch.float16: 45.0}
FLOPS, SIZE = 0.95, 0.55
#: one of each family in every run, more with the marker zoo
FIRST = ("bert-sdpa", "llama-sdpa")
MODELS = ("bert-sdpa", "llama-sdpa", "roberta", "gpt2-sdpa", "mistral", "gemma2", "bart", "vit-sdpa", "convnext",
          "segformer", "swin", "wav2vec2", "opt", "distilbert", "mamba", "falcon-alibi")  # fmt: skip
CASES = [
    pytest.param(name, low, marks=[] if name in FIRST and low is BF16 else [pytest.mark.zoo], id=f"{name}-{low}")
    for name in MODELS for low in LOW
]  # fmt: skip


def check(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype, file: Path, both_ways: int = 0
) -> None:
    """``both_ways``: bytes in fp32 of what is stored in fp32 and low, because ops of both precisions read it."""
    with torch.no_grad():
        exact = model(*args, **kwargs)
    converted = convert_model(model, args, kwargs, dtype=low)
    ours = converted(*args, **kwargs)
    assert type(ours) is type(exact)
    assert [t.dtype for t in floats(ours)] == [t.dtype for t in floats(exact)]
    report = converted.report()
    heavy = sorted((row for row in report.rows if row.flops and row.precision == "float32"), key=lambda r: -r.flops)
    assert snr(ours, exact) > SNR[low], report
    assert report.low_flops_share >= FLOPS, [str(row) for row in heavy[:3]]
    assert converted.details.stored_bytes - both_ways <= SIZE * converted.details.fp32_bytes
    converted.save(file)
    again = load_converted(file)(*args, **kwargs)
    for a, b in zip(floats(again), floats(ours), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", IMAGES)
def test_networks_for_images(name: str, low: torch.dtype, tmp_path: Path) -> None:
    model, x = IMAGES[name]()
    # the sizes of a detector's boxes are its anchors times an exp, which is fp32; their centres are low
    both_ways = model.anchors.nbytes if name == "detector" else 0
    check(model, (x,), {}, low, tmp_path / "model.pt2", both_ways)
    assert not any("batch_norm" in row.op or "dropout" in row.op for row in convert_model(model, (x,)).report().rows)


@pytest.mark.parametrize(("name", "low"), CASES)
def test_models_of_transformers(name: str, low: torch.dtype, tmp_path: Path) -> None:
    model, kwargs = ZOO[name]()
    model.eval().config.use_cache = False
    if name != "bart":
        kwargs.pop("labels", None)
    check(model, (), kwargs, low, tmp_path / "model.pt2")


@pytest.mark.zoo
def test_a_large_file_is_half_of_fp32s(tmp_path: Path) -> None:
    """Where weights are most of the file: the whole archive beside torch.export's of the fp32 model."""
    from networks import BertLike

    model, ids = BertLike(hidden=256, vocab=20000, intermediate=1024).eval(), torch.randint(1000, (2, 32))
    torch.export.save(torch.export.export(model, (ids,)), tmp_path / "fp32.pt2")
    convert_model(model, (ids,), dtype=BF16).save(tmp_path / "low.pt2")
    assert (tmp_path / "low.pt2").stat().st_size <= SIZE * (tmp_path / "fp32.pt2").stat().st_size
