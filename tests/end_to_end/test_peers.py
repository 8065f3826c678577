"""The tests that other mixed-precision systems have on lists, propagation and casts, in our own words.

Each test names the system it comes from. Counts are made by hand, beside the program. Loss scaling, training
steps and converted models have their own tests.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from amp_compiler import AmpModule, Policy, amp_compile, ir
from amp_compiler.capture.export import capture_export
from amp_compiler.common.errors import BannedOpError, PolicyError
from amp_compiler.inspect.profile import count_casts
from amp_compiler.passes import order
from amp_compiler.policy.ops.names import find_row
from amp_compiler.policy.ops.row import OpClass
from amp_compiler.rewrite.base import Context
from amp_compiler.rewrite.records import Record
from helpers import in_turn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LEVELS = ["O1", "auto", "O2", "O3"]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(target: Callable[..., Any], level: str = "auto", **options: Any) -> AmpModule:
    module: AmpModule = amp_compile(target, level, **{"dtype": BF16, "backend": "eager", **options})
    return module


def stage(module: AmpModule, name: str, graph: str = "") -> Record:
    """The last record of a pass."""
    return [r for r in module.history if r.name == name and r.graph.startswith(graph)][-1]


def casts(record: Record) -> list[str]:
    """The right-hand sides of all casts in a stage's text: ``x, bf16``."""
    return [line.split(" = cast(")[1].rstrip(")") for line in record.text.splitlines() if " = cast(" in line]


def precisions(module: AmpModule) -> list[tuple[str, str]]:
    return [(row.op, row.precision) for row in module.report().rows]


def parameter(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


# ------------------------------------------------------------------------------------- graphs left alone


@pytest.mark.parametrize("level", ["auto", "O1"])
def test_no_white_op_leaves_the_graph_unchanged(level: str) -> None:
    """TensorFlow: with nothing to gain from the low dtype there is nothing to cast."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(torch.exp(x) + y).softmax(-1)

    fast, x, y = compiled(program, level), torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(fast(x, y), program(x, y))
    assert stage(fast, "insert_casts").text == stage(fast, "capture").text
    assert not stage(fast, "insert_casts").modified
    assert fast.report().casts == 0
    assert set(fast.report().by_precision) == {"float32"}


@pytest.mark.parametrize(("level", "dtype"), in_turn(LEVELS, (BF16, FP16)))
def test_model_already_low_is_unchanged(level: str, dtype: torch.dtype) -> None:
    """TensorFlow: a model that its author made low runs as it was written, at every level."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    x = torch.randn(3, 4, dtype=dtype)
    fast = compiled(model, level, dtype=dtype)
    out = fast(x)
    assert out.dtype == dtype
    assert torch.equal(out, model(x))
    assert stage(fast, "insert_casts").text == stage(fast, "normalize").text
    assert fast.report().casts == 0


# ----------------------------------------------------------------------------------------- propagation


def chain(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    x = torch.relu(torch.exp(x))
    x = torch.relu(torch.sqrt(x))
    x = torch.relu(x @ w)
    x = torch.relu(torch.log(x + 1))
    return x @ v


def test_chain_only_around_the_products_turns_low() -> None:
    """TensorFlow's chain exp→relu→sqrt→relu→mm→relu→log→relu→mm. Its log may follow; ours, as everybody
    else's, is black: the first relu after a product is low, the one after the log is not. By hand, two casts
    around each product: its input and its result (and one for each weight)."""
    fast = compiled(lambda x, w, v: chain(x, w, v))
    with torch.no_grad():
        fast(torch.rand(4, 4), parameter(4, 4), parameter(4, 4))
    low, full = "bfloat16", "float32"
    # x + 1 follows the low relu
    assert precisions(fast) == [
        ("exp", full), ("relu", full), ("sqrt", full), ("relu", full), ("matmul", low), ("relu", low),
        ("add", low), ("log", full), ("relu", full), ("matmul", low),
    ]  # fmt: skip
    found = casts(stage(fast, "insert_casts"))
    assert found == ["w, bf16", "relu_1, bf16", "add, f32", "v, bf16", "relu_3, bf16", "matmul_1, f32"]
    assert stage(fast, "fold_casts").casts == 6


def test_chain_with_a_log_that_may_follow() -> None:
    """The same chain with TensorFlow's own list: low from the first product to the end, so two casts of
    activations: into the first product and of the result."""
    policy = Policy.default("auto", BF16).with_ops(follow=["log"])
    fast = compiled(lambda x, w, v: chain(x, w, v), policy=policy)
    with torch.no_grad():
        fast(torch.rand(4, 4), parameter(4, 4), parameter(4, 4))
    assert [p for _, p in precisions(fast)] == ["float32"] * 4 + ["bfloat16"] * 6
    assert casts(stage(fast, "insert_casts")) == ["w, bf16", "relu_1, bf16", "v, bf16", "matmul_1, f32"]


def test_bool_cast_feeding_a_product_is_retargeted() -> None:
    """TensorFlow: bool → float → matmul becomes bool → low → matmul, one cast and not two."""
    fast = compiled(lambda mask, w: mask.float() @ w)
    mask, w = torch.rand(4, 4) > 0.5, torch.randn(4, 4)
    with torch.no_grad():
        out = fast(mask, w)
    assert casts(stage(fast, "insert_casts")) == ["mask, f32", "w, bf16", "to, bf16", "matmul, f32"]
    assert casts(stage(fast, "fold_casts")) == ["arg1_1, bf16", "arg0_1, bf16", "mm, f32"]
    assert torch.equal(out, (mask.to(BF16) @ w.to(BF16)).float())


class ConvNormConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


@pytest.mark.parametrize("level", ["O1", "auto", "O2"])
def test_batch_norm_statistics_stay_fp32(level: str) -> None:
    """TensorFlow: between two low convolutions the data of a batch norm may be low; its weight, bias and
    statistics are fp32 in the forward and in the gradient."""
    model, x = ConvNormConv(), torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    fast = compiled(model, level)
    fast(x).square().sum().backward()

    def low(conv: nn.Conv2d, data: Tensor) -> Tensor:
        return F.conv2d(data.to(BF16), conv.weight.to(BF16), conv.bias.to(BF16))

    norm = twin.norm
    data = low(twin.first, x) if level == "O2" else low(twin.first, x).float()
    data = F.batch_norm(data, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)
    low(twin.second, data).float().square().sum().backward()
    for ours, theirs in zip(
        (*model.parameters(), *model.buffers()), (*twin.parameters(), *twin.buffers()), strict=True
    ):
        if theirs.is_floating_point():
            assert ours.dtype is FP32
            assert torch.equal(ours, theirs)
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    lines = stage(fast, "fold_casts", "joint").text.splitlines()
    backward = next(n for n in lines if "batch_norm_backward" in n and ": (" in n)
    assert backward.split(": (")[1].split(") = ")[0].endswith(", f32[4], f32[4]")


def test_batch_norm_with_gradient_accumulation() -> None:
    """OneFlow: two backwards before an update add up, and the running statistics move twice."""
    model, batches = ConvNormConv(), torch.randn(2, 2, 3, 8, 8)
    fast = compiled(model, "O2")
    single = []
    for x in batches:
        model.zero_grad()
        twin = compiled(copy.deepcopy(model), "O2")
        twin(x).sum().backward()
        single.append([p.grad for p in twin.parameters()])
    for x in batches:
        fast(x).sum().backward()
    for p, first, second in zip(model.parameters(), *single, strict=True):
        assert torch.equal(p.grad, first + second)
    assert int(model.norm.num_batches_tracked) == 2
    assert len(fast.graphs) == 1


def test_branches_agree() -> None:
    """TensorFlow: both sides of a branch give one dtype, whatever runs inside them."""

    def program(p: Tensor, x: Tensor, w: Tensor) -> Tensor:
        y = torch.cond(p, lambda x: x @ w, lambda x: torch.exp(x * 2), (x,))
        return y @ w

    fast, x, w = compiled(program), torch.randn(4, 4) / 4, parameter(4, 4)
    for p in (torch.tensor(True), torch.tensor(False)):
        with torch.no_grad():
            out = fast(p, x, w)
        torch.testing.assert_close(out, program(p, x, w), rtol=5e-2, atol=5e-2)
    rows = {row.node: row.precision for row in fast.report().rows}
    assert rows["true_graph_0.matmul"] == "bfloat16"
    assert rows["false_graph_0.exp"] == "float32"
    returned = [n for _, gm in ir.all_graphs(fast.graphs[0]) for n in gm.graph.nodes if n.op == "output"][1:]
    assert [[v.meta["val"].dtype for v in node.args[0]] for node in returned] == [[FP32], [FP32]]


def test_both_sides_of_a_loop_agree() -> None:
    """TensorFlow: what a loop carries enters and leaves each turn in one dtype."""
    from torch._higher_order_ops import while_loop

    def program(n: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, torch.tanh(x @ w)), (n, x))[1]

    fast, x, w = compiled(program), torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad():
        out = fast(torch.tensor(3), x, w)
        expected = x
        for _ in range(3):
            expected = torch.tanh(expected.to(BF16) @ w.to(BF16)).float()
    assert ("matmul", "bfloat16") in precisions(fast)
    assert torch.equal(out, expected)


# ------------------------------------------------------------------------------------------------- lists


def test_op_on_two_lists_is_an_error() -> None:
    """TensorFlow: a contradiction is refused, not resolved silently. However the op is spelled."""
    with pytest.raises(PolicyError, match=r"'linear' is on two lists \(low and fp32\)"):
        compiled(nn.Linear(2, 2), white_list=["linear"], black_list=[F.linear])
    with pytest.raises(PolicyError, match="two lists"):
        Policy().with_ops(low=["aten.exp"], follow=[torch.exp])
    with pytest.raises(PolicyError, match="two lists"):
        Policy(ops=(("exp", OpClass.LOW), ("aten.exp", OpClass.FP32)))


def test_custom_list_leaves_the_table_unchanged() -> None:
    """Paddle: a custom list is that one policy's, and the table and other policies never see it."""
    before = find_row("softmax")
    base = Policy.default("O1", BF16)
    fast = compiled(lambda x: x.softmax(-1), "O1", white_list=["softmax"])
    fast(torch.randn(2, 4))
    assert precisions(fast) == [("softmax", "bfloat16")]
    assert find_row("softmax") is before
    assert before is not None
    assert before.cls is OpClass.FP32
    assert base.classify("softmax").cls is OpClass.FP32
    plain = compiled(lambda x: x.softmax(-1), "O1")
    plain(torch.randn(2, 4))
    assert precisions(plain) == [("softmax", "float32")]


def three_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def test_excluded_node_stays_fp32_and_neighbours_are_right() -> None:
    """MXNet: an excluded layer is fp32, its neighbours are low, and casts stand on its two borders only."""
    model = three_layers()
    fast = compiled(model, exclude=["2"])
    with torch.no_grad():
        out = fast(x := torch.randn(3, 4))
    by_module = {row.module: row.precision for row in fast.report().rows}
    assert by_module == {"0": "bfloat16", "1": "bfloat16", "2": "float32", "3": "float32", "4": "bfloat16"}
    inner = [c for c in casts(stage(fast, "insert_casts")) if c.startswith(("linear", "relu"))]
    assert inner == ["relu, f32", "relu_1, bf16", "linear_2, f32"]
    with torch.no_grad():
        low = copy.deepcopy(model).to(BF16)
        hidden = model[2](low[1](low[0](x.to(BF16))).float())
        assert torch.equal(out, low[4](model[3](hidden).to(BF16)).float())


def test_exclusions_do_not_leak_into_the_next_call() -> None:
    """MXNet: default arguments are not mutable, so a call without exclusions has none."""
    model, x = three_layers(), torch.randn(3, 4)
    compiled(model, exclude=[nn.Linear], white_list=["softmax"], black_list=["relu"], disable_passes=["fold_casts"])(x)
    fast = compiled(model)
    fast(x)
    assert set(fast.report().by_precision) == {"bfloat16"}
    assert fast.policy == Policy.default("auto", BF16)
    assert stage(fast, "fold_casts").note == ""


# -------------------------------------------------------------------------------------- counts by hand


def test_operand_used_twice_is_cast_once() -> None:
    """OneFlow: ``x * x`` reads one tensor twice: one cast, and no crash. The second cast is the result's."""
    fast, x = compiled(lambda x: x * x, "O2"), torch.randn(4, 4)
    with torch.no_grad():
        out = fast(x)
    assert casts(stage(fast, "fold_casts")) == ["arg0_1, bf16", "mul, f32"]
    assert torch.equal(out, (x.to(BF16) * x.to(BF16)).float())
    y = parameter(4, 4)
    fast(y).sum().backward()
    assert casts(stage(fast, "fold_casts", "joint")).count("primals_1, bf16") == 1
    assert y.grad is not None
    assert y.grad.dtype is FP32


class Reshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).reshape(-1, 3))


def test_two_dense_layers_and_a_reshape() -> None:
    """MXNet: low tensors and casts counted by hand.

    Casts: the input, two weights, two biases, the result = 6. Low tensors: the first five of those, and what
    the two linears and the reshape give = 8.
    """
    model, x = Reshaped(), torch.randn(2, 4)
    fast = compiled(model)
    with torch.no_grad():
        fast(x)
    forward = stage(fast, "insert_casts").text
    assert len(casts(stage(fast, "insert_casts"))) == stage(fast, "fold_casts").casts == 6
    assert forward.count(": bf16[") == 8
    with torch.no_grad():
        ran = count_casts(lambda: fast(x))
    assert ran.number == 6
    # elements: x 8, weights 24 + 6, biases 6 + 2 in two bytes; the result 4 × 2 in four
    assert ran.bytes == 2 * (8 + 24 + 6 + 6 + 2) + 4 * 8
    assert (fast.report().casts, fast.report().cast_bytes) == (ran.number, ran.bytes)


@pytest.mark.parametrize("level", ["O1", "auto"])
def test_shared_parameter_with_a_low_and_an_fp32_consumer(level: str) -> None:
    """MXNet: a parameter that one op wants low and another in fp32 stays one fp32 parameter with one cast."""
    w, x = parameter(4, 4), torch.randn(3, 4)
    fast = compiled(lambda x, w: (x @ w) + torch.exp(w).sum(), level)
    fast(x, w).sum().backward()
    assert casts(stage(fast, "insert_casts")).count("w, bf16") == 1
    assert not [c for c in casts(stage(fast, "insert_casts")) if c.startswith("w,") and c != "w, bf16"]
    assert "exp: f32[4, 4] = exp(w)" in stage(fast, "insert_casts").text
    assert w.grad is not None
    assert w.grad.dtype is FP32


def test_weight_used_twice_is_cast_once() -> None:
    """PyTorch: autocast keeps the cast of a weight within a region; here it is one node from the start."""
    w, x = parameter(4, 4), torch.randn(3, 4)
    fast = compiled(lambda x, w: F.linear(torch.relu(F.linear(x, w)), w))
    fast(x, w).sum().backward()
    assert casts(stage(fast, "insert_casts")).count("w, bf16") == 1
    assert casts(stage(fast, "fold_casts", "joint")).count("primals_2, bf16") == 1


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.softmax(-1)
        return torch.cat([layer(hidden) for layer in self.layers], dim=-1)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_branching_network_casts_its_shared_input_once(grad: bool) -> None:
    """MindSpore: three branches read one fp32 value: three casts as inserted, so that gradients add up in
    fp32, and one in the graph that runs."""
    fast, x = compiled(Branches()), torch.randn(3, 4).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        out = fast(x)
    assert casts(stage(fast, "insert_casts")).count("softmax, bf16") == 3
    folded = casts(stage(fast, "fold_casts", "joint" if grad else "inference"))
    assert sum(c.startswith("_softmax") and c.endswith(", bf16") for c in folded) == 1
    if grad:
        out.sum().backward()
        assert x.grad is not None


class ConvModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.second, self.out = nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        x = torch.relu(self.second(x))
        return torch.softmax(self.out(torch.tanh(x.flatten(2).sum(-1))), dim=-1)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # low: three products, the relu after the second conv and the flatten after it
        ("O1", {"bfloat16": 5, "float32": 6}),
        # batch norm is fp32 inside and takes low data, so relu and max pool after it are low too; softmax is
        # fp32 inside; fp32 are the sum, and tanh, which reads it
        ("O2", {"bfloat16": 9, "float32": 2}),
        ("O0", {"float32": 11}),
        ("O3", {"bfloat16": 11}),
    ],
)
def test_conv_model_has_exact_counts_per_dtype(level: str, expected: dict[str, int]) -> None:
    """Paddle: the number of ops in each dtype, by hand, for O1 and O2 (and the two ends)."""
    fast = compiled(ConvModel(), level)
    fast(torch.randn(2, 1, 10, 10))
    counted = Counter(p for op, p in precisions(fast) if op not in ("add_", "add"))  # num_batches_tracked
    assert counted == expected


SMALL_GRAPHS: list[tuple[str, Callable[..., Tensor], int]] = [
    # input, weight, result: nothing between two products
    ("between two products", lambda x, w: (x @ w).t().reshape(4, 4) @ w, 3),
    # the exp's result is cast, once, before it is expanded; the weight; the result
    ("before an expand", lambda x, w: x.exp()[:1].expand(4, 4) @ w, 3),
    # a low value that only moves on its way to fp32 ops: one cast, not one for each
    ("one up-cast for two readers", lambda x, w: (y := x @ w).exp() + y.log1p(), 3),
    # fp32 → low → fp32, by the author: both stay
    ("the author's rounding", lambda x, w: x.to(BF16).float().exp(), 2),
    # low → fp32 → low around a transpose: input, weight and result are left
    ("an idle round trip", lambda x, w: (x @ w).float().t() @ w, 3),
]


@pytest.mark.parametrize(("program", "expected"), [c[1:] for c in SMALL_GRAPHS], ids=[c[0] for c in SMALL_GRAPHS])
def test_cast_counts_of_small_graphs(program: Callable[..., Tensor], expected: int) -> None:
    """ONNX Runtime: casts move and meet; what is left is counted by hand, in the graph and as it runs."""
    fast, x, w = compiled(lambda x, w: program(x, w)), torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad():
        fast(x, w)
        ran = count_casts(lambda: fast(x, w))
    assert stage(fast, "fold_casts").casts == expected, stage(fast, "fold_casts").text
    assert ran.number == expected, ran


# ------------------------------------------------------------------------------------- order of nodes


def shuffled(gm: fx.GraphModule, seed: int) -> fx.GraphModule:
    """The same graph with its nodes in another valid order."""
    choose = random.Random(seed)
    nodes = list(gm.graph.nodes)
    calls = [n for n in nodes if n.op in ("call_function", "get_attr")]
    waiting = {n: sum(i in calls for i in n.all_input_nodes) for n in calls}
    anchor = next(n for n in nodes if n.op == "output")
    while waiting:
        node = choose.choice([n for n, count in waiting.items() if count == 0])
        anchor.prepend(node)
        del waiting[node]
        for user in node.users:
            if user in waiting:
                waiting[user] -= 1
    gm.graph.lint()
    return gm


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_order_of_nodes_does_not_matter(level: str, seed: int) -> None:
    """MXNet: whatever valid order the nodes are in, each gets the same precision and as many casts."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            left, right = self.a(x).relu(), self.b(y).exp()
            both = torch.cat([left + right, left * 2], dim=-1)
            return self.c(both) + (left * right).sum() + self.a(y)

    ctx = Context(Policy.default(level, BF16))
    forward = order.build().forward
    results = []
    for reorder in (False, True):
        gm = capture_export(Net(), (torch.randn(2, 4), torch.randn(2, 4))).graph
        before = [n.name for n in gm.graph.nodes]
        if reorder:
            shuffled(gm, seed)
            assert [n.name for n in gm.graph.nodes] != before
        history: list[Record] = []
        forward.run(gm, ctx, history, graph="forward")
        decisions = {
            n.name: (d.precision, d.out) for n in gm.graph.nodes if (d := ir.decision(n)) and d.rule != "inserted"
        }
        results.append((decisions, Counter(casts(history[-1]))))
    assert results[0] == results[1]


# ------------------------------------------------------------------------ what the author said, and modes


@pytest.mark.parametrize("level", LEVELS)
def test_log_of_fp64_keeps_its_dtype(level: str) -> None:
    """PyTorch: fp64 is never touched."""
    fast, x = compiled(torch.log, level), torch.rand(4, dtype=torch.float64) + 1
    out = fast(x)
    assert out.dtype is torch.float64
    assert torch.equal(out, torch.log(x))
    mixed = compiled(lambda x, y: torch.log(x) * y, level)
    assert mixed(x, torch.ones(4)).dtype is torch.float64
    assert mixed.report().casts == 0


@pytest.mark.parametrize("level", LEVELS)
def test_softmax_with_dtype_keeps_it(level: str) -> None:
    """PyTorch: an explicit ``dtype=`` wins over any list."""
    fast = compiled(lambda x, w: (x @ w).softmax(-1, dtype=FP32), level, keep_output_dtypes=False)
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    out = fast(x, w)
    assert out.dtype is FP32
    assert torch.equal(out, (x.to(BF16) @ w.to(BF16)).softmax(-1, dtype=FP32))
    wide = compiled(lambda x: x.softmax(-1, dtype=torch.float64), level)
    assert wide(x).dtype is torch.float64
    assert torch.equal(wide(x), x.softmax(-1, dtype=torch.float64))


@pytest.mark.parametrize("policy", [*LEVELS, "torch"])
def test_nested_disabled_region_is_fp32_forward_and_backward(policy: str) -> None:
    """PyTorch: inside ``autocast(enabled=False)`` an fp32 op is fp32, and so is its gradient."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x @ w
        return y

    options: dict[str, Any] = {"policy": Policy.torch("cpu", BF16)} if policy == "torch" else {"level": policy}
    x, w = parameter(4, 4), parameter(4, 4)
    fast = compiled(program, **options)
    out = fast(x, w)
    tangent = torch.randn(4, 4)
    out.backward(tangent)
    assert torch.equal(out, x @ w)
    assert torch.equal(x.grad, tangent @ w.detach().t())
    assert torch.equal(w.grad, x.detach().t() @ tangent)
    assert precisions(fast) == [("matmul", "float32")]
    assert "bf16" not in stage(fast, "fold_casts", "joint").text


@pytest.mark.parametrize("level", ["auto", "O2", "O3"])
def test_train_eval_train_has_no_stale_weights(level: str) -> None:
    """Apex: a low copy of a weight never outlives the weight: steps, eval, loading and writes all count."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    fast, x = compiled(model, level), torch.randn(3, 4)
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.5)

    def check() -> None:
        low = copy.deepcopy(model).to(BF16)  # at all three levels that is what the compiled model does
        assert torch.equal(fast(x), low(x.to(BF16)).float())

    for mode in (True, False, True):
        fast.train(mode)
        check()
        fast(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        check()
    with torch.no_grad():
        model[0].weight.mul_(2)
        check()
    fast.load_state_dict({k: v + 1 for k, v in fast.state_dict().items()})
    check()


@pytest.mark.parametrize("level", ["auto", "O2"])
@pytest.mark.parametrize("op", ["add_", "mul_", "sub_", "div_", "copy_", "relu_", "exp_", "clamp_", "addmm_"])
def test_in_place_op_keeps_the_dtype_of_self(level: str, op: str) -> None:
    """Apex: an in-place op runs in the dtype of what it writes to, be it low or fp32, and the write is seen
    by everybody who holds the tensor."""

    def program(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        buffer, product = y.clone(), x @ w
        extra = {"relu_": (), "exp_": (), "clamp_": (-0.5, 0.5), "addmm_": (y, x)}
        for target, other in ((buffer, product), (product, y)):
            other = other.abs() + 1 if op == "div_" else other
            getattr(target, op)(*extra.get(op, (other,)))
        return buffer, product

    x, y, w = (torch.randn(4, 4) for _ in range(3))
    fast = compiled(program, level, keep_output_dtypes=False)
    with torch.no_grad():
        buffer, product = fast(x, y, w)
        expected = program(x, y, w)
    assert buffer.dtype is FP32
    assert product.dtype is BF16
    for ours, theirs in zip((buffer, product), expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("level", ["auto", "O2"])
def test_in_place_op_on_an_input_is_seen_by_the_caller(level: str) -> None:
    """Apex, as above."""
    x, y, w = (torch.randn(4, 4) for _ in range(3))
    with torch.no_grad():
        z = y.clone()
        compiled(lambda z, x, w: z.add_(x @ w), level)(z, x, w)
    torch.testing.assert_close(z, y + x @ w, rtol=0.05, atol=0.05)


def test_banned_op_says_what_to_use_instead() -> None:
    """PyTorch: binary_cross_entropy on low probabilities is refused with the safe form's name and the line."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(torch.sigmoid(x), y)

    x, y = torch.randn(4), torch.rand(4)
    for options in ({"level": "O3", "dtype": FP16}, {"policy": Policy.torch("cuda", FP16), "dtype": FP16}):
        with pytest.raises(BannedOpError, match="binary_cross_entropy_with_logits") as raised:
            compiled(loss, **options)(x, y)
        assert "test_peers.py" in str(raised.value)
    for level in ("O1", "auto", "O2"):  # fp32 there, and so allowed
        assert torch.isfinite(compiled(loss, level, dtype=FP16)(x, y))
