"""Seconds of single nodes: the bound that holds, what shapes do, and that nothing is free that moves bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from amp_compiler.cost.devices import find
from amp_compiler.cost.model import STREAMED, SUSTAINED, UNALIGNED, CostModel
from amp_compiler.cost.products import Product, products
from helpers import pre_dispatch

V100, A100 = find("v100_sxm2"), find("a100_80")
LOW = torch.float16


def node_of(fn: Callable[..., Any], *inputs: torch.Tensor, name: str = "") -> fx.Node:
    gm = pre_dispatch(fn, *inputs)
    found = [n for n in gm.graph.nodes if n.op == "call_function" and name in n.name]
    return found[-1]


def test_an_element_wise_op_waits_for_memory() -> None:
    node = node_of(lambda x: x * 2, torch.ones(1000, 1000))
    model = CostModel(V100)
    assert model.parts(node).nbytes == 8_000_000
    assert model.seconds(node) == pytest.approx(8e6 / (900e9 * STREAMED) + V100.launch)
    assert model.seconds(node, LOW) == pytest.approx(4e6 / (900e9 * STREAMED) + V100.launch)


def test_a_large_product_waits_for_the_units() -> None:
    node = node_of(lambda a, b: a @ b, torch.empty(8192, 8192, device="meta"), torch.empty(8192, 8192, device="meta"))
    model = CostModel(V100)
    flops = 2 * 8192**3
    assert model.parts(node).compute == pytest.approx(flops / (15.7e12 * SUSTAINED["fp32"]), rel=0.05)
    assert model.parts(node, LOW).compute == pytest.approx(flops / (125e12 * SUSTAINED["fp16"]), rel=0.05)
    assert CostModel(A100).seconds(node) < CostModel(A100, tf32=False).seconds(node) / 4


def test_views_are_free_and_copies_are_not() -> None:
    gm = pre_dispatch(lambda x: x.t().reshape(-1).clone(), torch.ones(64, 64))
    model = CostModel(V100)
    seconds = {n.name: model.seconds(n) for n in gm.graph.nodes}
    assert [name for name, s in seconds.items() if s] == ["clone"]


def test_a_cast_moves_both_dtypes() -> None:
    value = torch.empty(1 << 20, device="meta")
    model = CostModel(V100)
    assert model.cast_seconds(value, LOW) == pytest.approx(6 * (1 << 20) / (900e9 * STREAMED) + V100.launch)
    node = node_of(lambda x: x.to(LOW), torch.ones(1 << 20))
    assert model.seconds(node) == pytest.approx(model.cast_seconds(value, LOW))


def test_an_embedding_reads_its_rows_only() -> None:
    weight, ids = torch.empty(100_000, 64), torch.zeros(8, dtype=torch.int64)
    node = node_of(lambda i, w: F.embedding(i, w), ids, weight)
    assert CostModel(V100).parts(node).nbytes == 2 * 8 * 64 * 4 + 64


def test_a_fused_chain_reads_and_writes_once() -> None:
    x = torch.ones(1 << 20)
    gm = pre_dispatch(lambda x: (x * 2).exp() + 1, x)
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    apart, fused = CostModel(V100), CostModel(V100, fused=True)
    assert sum(apart.parts(n).nbytes for n in nodes) == 3 * 8 * (1 << 20)
    assert sum(fused.parts(n).nbytes for n in nodes) == 8 * (1 << 20)
    assert sum(fused.parts(n).launch for n in nodes) == V100.launch


def test_the_backward_of_a_product_is_two_products() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    program = torch.export.export(layers, (torch.ones(64, 64),))
    first, second = (n for n in program.graph.nodes if n.op == "call_function")
    model = CostModel(V100)
    assert model.backward_seconds(first) == pytest.approx(model.seconds(first)), "the input needs no gradient"
    assert model.backward_seconds(second) == pytest.approx(2 * model.seconds(second))


# -------------------------------------------------------------------------------------------------- products


def test_sizes_of_products() -> None:
    x, w = torch.ones(4, 16, 32), torch.ones(8, 32)
    assert products(node_of(F.linear, x, w)) == (Product(64, 8, 32, 1, (8, 32)),)
    q = torch.ones(2, 4, 8, 16)
    flops = sum(p.flops for p in products(node_of(F.scaled_dot_product_attention, q, q, q)))
    assert flops == 4 * 2 * 4 * 8 * 8 * 16


@pytest.mark.parametrize(("length", "share"), [(64, 1.0), (128, 1.0), (1024, 0.5625)])
def test_causal_attention_skips_blocks_of_long_sequences(length: int, share: float) -> None:
    q = torch.empty(1, 1, length, 32, device="meta")
    whole = node_of(lambda q: F.scaled_dot_product_attention(q, q, q), q)
    causal = node_of(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q)
    flops = [sum(p.flops for p in products(node)) for node in (whole, causal)]
    assert flops[1] == share * flops[0]


def test_groups_run_on_ordinary_units() -> None:
    node = node_of(lambda x, w: F.conv2d(x, w, groups=32), torch.ones(2, 32, 8, 8), torch.ones(32, 1, 3, 3))
    model = CostModel(V100)
    assert model.parts(node).compute == pytest.approx(model.parts(node, LOW).compute, rel=0.5)
    assert products(node)[0].grouped


def test_matrix_units_reorder_images_that_are_not_channels_last() -> None:
    x, w = torch.ones(2, 64, 16, 16), torch.ones(64, 64, 3, 3)
    last = x.to(memory_format=torch.channels_last)
    model = CostModel(V100)
    plain, quick = (node_of(lambda x, w: F.conv2d(x, w), image, w) for image in (x, last))
    assert model.parts(plain, LOW).nbytes == 3 * model.parts(quick, LOW).nbytes
    assert model.parts(plain).nbytes == model.parts(quick).nbytes, "ordinary units take either"


def test_unaligned_sizes_take_longer() -> None:
    model = CostModel(V100)
    good, bad = Product(4096, 4096, 4096, 1, (4096,)), Product(4096, 4096, 4096, 1, (4097,))
    quick, slow = (model.product_seconds(p, "fp16", 2) for p in (good, bad))
    assert slow == pytest.approx(quick / UNALIGNED, rel=0.05), "another tile may suit it"
    assert model.product_seconds(bad, "fp32", 4) == model.product_seconds(good, "fp32", 4)


SIZES = st.integers(1, 5000)


@given(SIZES, SIZES, SIZES, st.integers(1, 64), st.sampled_from(["v100_sxm2", "a100_80", "h100_sxm", "t4"]))
@settings(max_examples=200)
def test_no_product_beats_the_device(m: int, n: int, k: int, batch: int, name: str) -> None:
    device = find(name)
    model = CostModel(device)
    product = Product(m, n, k, batch, (n, k))
    for unit, itemsize in (("fp32", 4), ("fp16", 2)):
        seconds = model.product_seconds(product, unit, itemsize)
        assert seconds >= product.flops / device.peak[unit]
        more = model.product_seconds(Product(2 * m, n, k, batch, (n, k)), unit, itemsize)
        assert more >= seconds * 0.999, "twice the rows never take less time"
