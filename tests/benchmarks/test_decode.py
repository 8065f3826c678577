"""Decoding: what the decoder sees, and the shapes that the benchmark of the kernels reads."""

from __future__ import annotations

import tomllib
from pathlib import Path

import decode
import torch


def test_a_token_sees_itself_and_what_came_before_it() -> None:
    torch.manual_seed(0)
    model = decode.Decoder(*decode.SIZES["tiny"]).eval()
    keys, values = torch.randn(model.kept), torch.randn(model.kept)
    token, position = torch.tensor([[3]]), torch.tensor([5])
    logits, key, value = model(token, position, keys, values)
    assert key.shape == value.shape == (*model.kept[:3], 1, model.kept[4])
    later, earlier = keys.clone(), keys.clone()
    later[:, :, :, 5:] = 7.0  # its own place is written by the model
    earlier[:, :, :, 4] = 7.0
    assert torch.equal(model(token, position, later, values)[0], logits)
    assert not torch.equal(model(token, position, earlier, values)[0], logits)


def test_generated_tokens_are_the_most_likely_ones() -> None:
    torch.manual_seed(0)
    model = decode.Decoder(*decode.SIZES["tiny"]).eval()
    found = decode.generate(model, model.kept, 4)
    assert found == decode.generate(model, model.kept, 4)
    empty = torch.zeros(model.kept)
    logits, _, _ = model(torch.ones(1, 1, dtype=torch.long), torch.tensor([0]), empty, empty)
    assert found[0] == logits.argmax()


def test_one_of_the_models_has_300_million_parameters() -> None:
    with torch.device("meta"):
        model = decode.Decoder(*decode.SIZES["368 million"])
    assert sum(p.numel() for p in model.parameters()) >= 300e6


def test_shapes_of_kernels() -> None:
    """Every section has the right number of sizes, and low-precision weights of more than 32 MB are among them."""
    shapes = tomllib.loads((Path(decode.__file__).with_name("kernel_shapes.toml")).read_text())
    numbers = {"products": (3,), "batched": (4,), "convolutions": (6, 7), "attention": (4,), "layers": (2,)}
    for kind in ("products", "batched", "convolutions", "attention"):
        assert all(len(shape) in numbers[kind] for shape in shapes[kind]["usual"] + shapes[kind]["more"])
    for network in shapes["networks"].values():
        for kind in ("layers", "convolutions", "attention"):
            assert all(len(shape) in numbers[kind] for shape in network[kind])
    assert any(2 * k * n > 32 << 20 for k, n in shapes["networks"]["llama_7b"]["layers"])
