"""What comes after: ONNX in onnxruntime, torch.compile, AOTInductor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.export import Dim

from amp_compiler import ArchiveError, ConvertedModel, convert_model
from helpers import BF16, F16
from networks import BertLike

KINDS = onnx.TensorProto.DataType


def small(low: torch.dtype) -> tuple[nn.Module, ConvertedModel, Tensor]:
    torch.manual_seed(0)
    model = BertLike(layers=1, hidden=32, heads=2, intermediate=64, vocab=50, seq=16).eval()
    ids = torch.randint(50, (2, 16))
    return model, convert_model(model, (ids,), dtype=low, dynamic_shapes={"ids": {0: Dim("batch")}}), ids


@pytest.mark.parametrize("low", [F16, BF16])
def test_onnx(low: torch.dtype, tmp_path: Path) -> None:
    model, converted, ids = small(low)
    converted.to_onnx(tmp_path / "model.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    found = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(found)
    sizes = {}
    for tensor in found.graph.initializer:
        sizes[tensor.data_type] = sizes.get(tensor.data_type, 0) + int(np.prod(tensor.dims))
    assert sizes[KINDS.FLOAT16 if low is F16 else KINDS.BFLOAT16] > 0.9 * sum(p.numel() for p in model.parameters())
    if low is F16:
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        for given in (ids, torch.randint(50, (5, 16))):
            (ours,) = session.run(None, {name: given.numpy()})
            # results near 1 after a dozen roundings of 2**-11
            np.testing.assert_allclose(ours, converted(given).numpy(), rtol=0, atol=5e-3)
    else:  # onnxruntime has no bf16 kernels for CPUs: "Could not find an implementation for Add(14)"
        (ours,) = ReferenceEvaluator(found).run(None, {found.graph.input[0].name: ids.numpy()})
        np.testing.assert_allclose(ours, converted(ids).numpy(), rtol=0, atol=4e-2)  # of 2**-8


def test_a_place_for_onnx_that_cannot_be_written(tmp_path: Path) -> None:
    _, converted, _ = small(F16)
    with pytest.raises(ArchiveError, match=r"pass the path of a file, such as model\.onnx"):
        converted.to_onnx(tmp_path)


@pytest.mark.zoo
@pytest.mark.parametrize("low", [F16, BF16])
def test_compile_and_aot_inductor(low: torch.dtype, tmp_path: Path) -> None:
    """Inductor keeps fp32 between fused ops: as near as the roundings it leaves out."""
    _, converted, ids = small(low)
    bound = 0.04 if low is BF16 else 0.005
    expected = converted(ids)
    with torch.no_grad():
        compiled = torch.compile(converted.exported_program.module())
        torch.testing.assert_close(compiled(ids), expected, rtol=0, atol=bound)
        path = torch._inductor.aoti_compile_and_package(
            converted.exported_program, package_path=str(tmp_path / "packaged.pt2")
        )
        packaged = torch._inductor.aoti_load_package(path)
        torch.testing.assert_close(packaged(ids), expected, rtol=0, atol=bound)
