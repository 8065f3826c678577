"""Odd models, odd inputs, odd surroundings: it works as without us, or it says why."""

import dataclasses
import inspect
import warnings
from collections import namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import AmpModule, AmpWarning, amp_compile
from amp_compiler.common.errors import AmpError, ArgumentError, CaptureError

BF16, FP16 = torch.bfloat16, torch.float16
Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Result:
    logits: Tensor
    loss: Tensor | None = None
    name: str = "result"


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def compiled(target: Any, level: str = "O2", **options: Any) -> AmpModule:
    return amp_compile(target, level, **{"dtype": BF16, "backend": "eager"} | options)


def square(rows: int = 4, **options: Any) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)).requires_grad_(**options or {})


def floats(rows: int = 4) -> Tensor:
    return square(rows).detach()


def close(found: Tensor, expected: Tensor) -> bool:
    """Equal within a few roundings to bf16 (8 bits)."""
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    return torch.allclose(found, expected, rtol=2**-5, atol=2**-5)


def linear(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(inputs, outputs)


# --------------------------------------------------------------------------------------------- outputs


class Returns(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.fc = linear()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.fc(x), x)


OUTPUTS = {
    "dict": lambda y, x: {"logits": y, "hidden": {"x": x + 1}, "n": 3},
    "dataclass": lambda y, x: Result(y, y.sum()),
    "namedtuple": lambda y, x: Pair(y, [x * 2]),
    "typed": lambda y, x: Typed(y, x * 2),
    "none": lambda y, x: None,
    "nested": lambda y, x: (y, [None, (x * 2, {"a": y.relu()})], "text", 2.5, True),
    "floats": lambda y, x: (float(y.shape[0]), 1.5, y),
    "nothing": lambda y, x: (),
    "text": lambda y, x: "done",
    "integers": lambda y, x: y.argmax(-1),
    "shape": lambda y, x: (y.shape, y),
    "dtype": lambda y, x: (y.dtype, y.device, y),
}


def same_structure(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert ours.dtype is theirs.dtype
        assert close(ours, theirs) if ours.is_floating_point() else torch.equal(ours, theirs)
    elif dataclasses.is_dataclass(ours):
        same_structure(vars(ours), vars(theirs))
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        same_structure(list(ours.values()), list(theirs.values()))
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same_structure(a, b)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", OUTPUTS)
def test_any_output(name):
    model = Returns(OUTPUTS[name])
    fast = compiled(model)
    for _ in range(2):
        same_structure(fast(floats()), model(floats()))


def test_an_output_that_is_the_input():
    fast = compiled(lambda x: (x, x @ x))
    x = floats()
    same, product = fast(x)
    assert same is x
    assert close(product, x @ x)
    view = compiled(lambda x: (x @ x, x.view(-1)))(x)[1]
    view.zero_()
    assert not x.any(), "a view of an input is still a view"


def test_one_output_twice():
    def code(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ x
        return y, y

    x = square()
    a, b = compiled(code)(x)
    assert torch.equal(a, b)
    (a + b).sum().backward()
    once, y = x.grad, square()
    (compiled(code)(y)[0] * 2).sum().backward()
    assert torch.equal(once, y.grad)


# ---------------------------------------------------------------------------------------------- inputs


def test_zero_size_tensors():
    model = nn.Sequential(linear(), nn.LayerNorm(4), nn.GELU(), linear(4, 2))
    fast = compiled(model)
    x = torch.zeros(0, 4, requires_grad=True)
    out = fast(x)
    assert out.shape == (0, 2)
    assert out.dtype is torch.float32
    out.sum().backward()
    assert x.grad.shape == (0, 4)
    assert all(not p.grad.any() for p in model[3].parameters())
    assert close(fast(floats()), model(floats()))
    empty = compiled(lambda a, b: a @ b)(torch.zeros(3, 0), torch.zeros(0, 2))
    assert torch.equal(empty, torch.zeros(3, 2))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_complex_numbers_are_never_touched(level):
    def code(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.complex(x, x + 1) @ z
        return y, y.abs(), torch.fft.rfft(x)

    z = torch.randn(4, 4, dtype=torch.complex64)
    for ours, theirs in zip(compiled(code, level)(floats(), z), code(floats(), z), strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.allclose(ours, theirs, rtol=2**-5, atol=2**-5)
    ours, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    compiled(lambda z: (z @ z).abs(), level)(ours).sum().backward()
    (theirs @ theirs).abs().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_complex_number_makes_the_same_dtype(dtype):
    fast = amp_compile(lambda x: ((x @ x) + 1j, (x @ x) * 2), dtype=dtype, keep_output_dtypes=False)
    with_number, low = fast(torch.randn(4, 4))
    assert with_number.dtype is torch.complex64
    assert low.dtype is dtype


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_double_model_stays_double(level):
    model = nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(4)).double()
    x = floats().double()
    fast = compiled(model, level)
    assert torch.equal(fast(x), model(x))
    assert fast.report().casts == 0
    fast(x).sum().backward()
    assert all(p.grad.dtype is torch.float64 for p in model.parameters())


def test_doubles_among_floats_promote_as_without_us():
    def code(x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ x) * d, torch.cat([x, d])

    x, d = floats(), floats(4).double()
    for ours, theirs in zip(compiled(code, "O3")(x, d), code(x, d), strict=True):
        assert close(ours, theirs)


def test_an_integer_model():
    def code(i: Tensor) -> Tensor:
        return (i * 2 + i.cumsum(0)) % 5 == 1

    fast = compiled(code)
    i = torch.arange(12)
    assert torch.equal(fast(i), code(i))
    assert set(fast.report().by_precision) == {"other"}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_input(layout):
    dense = torch.eye(4) * 1.001
    s = dense.to_sparse(layout=layout)
    fast = compiled(lambda s, x: s @ x + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpWarning)
        out = fast(s, floats())
    assert close(out, dense @ floats() + 1)
    told = [w for w in caught if w.category is AmpWarning]
    assert fast.report().rows or told, "it runs in fp32, without a word"
    assert fast.report().rows or fast.report().not_captured


@pytest.mark.parametrize("make", [nn.Sequential, nn.Identity], ids=["Sequential", "Identity"])
def test_a_module_without_ops(make):
    def breaks(x: Tensor) -> Tensor:
        print(end="")
        return x + 1

    compiled(breaks)(floats())  # what another model could not do is no reason to warn of this one
    fast = compiled(make())
    x = square()
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        for _ in range(2):
            assert fast(x) is x
    assert fast.report().rows == ()
    assert fast.report().not_captured == ()
    assert str(fast.report())


def test_keyword_arguments_only():
    class Keywords(nn.Module):
        def forward(self, *, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
            return left @ right * scale

    fast = compiled(Keywords())
    x = floats()
    assert close(fast(left=x, right=x, scale=0.5), x @ x * 0.5)
    with pytest.raises(TypeError, match="right"):
        fast(left=x)


@pytest.mark.parametrize(
    "given",
    [
        {"left": floats(), "right": floats(), "mask": None},
        [floats(), [floats()], 0.5],
        Pair(floats(), floats()),
        Typed(floats(), floats()),
        Result(floats(), floats()),
    ],
    ids=["dict", "list", "namedtuple", "typed", "dataclass"],
)
def test_structured_inputs(given):
    def code(v: Any) -> Tensor:
        if isinstance(v, dict):
            return v["left"] @ v["right"]
        if isinstance(v, list):
            return v[0] @ v[1][0] * v[2]
        return v.logits @ v.loss if isinstance(v, Result) else v.left @ v.right

    fast = compiled(code)
    assert close(fast(given), code(given))
    assert "bfloat16" in fast.report().by_precision


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_low_input_to_an_fp32_model(dtype):
    """Elementwise code promotes as without us; a product of two dtypes fails, or works as under autocast."""
    def code(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x * w, x + x

    x = floats().to(dtype)
    for ours, theirs in zip(compiled(code)(x, floats()), code(x, floats()), strict=True):
        assert close(ours, theirs)
    model = linear()
    try:
        out = compiled(model)(x)
    except RuntimeError as error:
        assert "dtype" in str(error)  # noqa: PT017
    else:
        assert torch.allclose(out.float(), model(x.float()), rtol=2**-5, atol=2**-5)


def test_a_model_that_is_low_already():
    model = nn.Sequential(linear(), nn.GELU()).to(BF16)
    fast = compiled(model)
    x = floats().to(BF16)
    assert torch.equal(fast(x), model(x))
    assert fast.report().casts == 0


def test_a_model_on_the_meta_device():
    model = nn.Sequential(linear(), nn.ReLU(), linear()).to("meta")
    fast = compiled(model)
    out = fast(torch.empty(3, 4, device="meta"))
    assert out.is_meta
    assert out.shape == (3, 4)
    assert out.dtype is torch.float32
    assert fast.report().by_precision == {"bfloat16": 3}


def test_a_parameter_that_two_modules_share():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, i: Tensor) -> Tensor:
            return self.head(self.embedding(i))

    model = Tied()
    fast = compiled(model)
    i = torch.tensor([0, 2, 5])
    assert [name for name, _ in fast.named_parameters()] == ["embedding.weight"]
    assert list(fast.state_dict()) == ["embedding.weight", "head.weight"]
    fast(i).square().sum().backward()
    ours = model.embedding.weight.grad.clone()
    model.zero_grad()
    model(i).square().sum().backward()
    assert torch.allclose(ours, model.embedding.weight.grad, rtol=2**-4, atol=2**-4)


# ------------------------------------------------------------------------------------- shapes and modes


def test_other_batch_sizes():
    model = nn.Sequential(linear(), nn.GELU(), linear(4, 3))
    fast = compiled(model)
    for rows in (4, 7, 2, 1, 30, 4):
        out = fast(floats(rows))
        assert close(out, model(floats(rows)))
        out.sum().backward()
    assert 2 <= len(fast.graphs) <= 4, "one, a dynamic one, and at most a special one for 1"


def test_dynamic_from_the_start():
    fast = compiled(nn.Sequential(linear(), nn.GELU()), dynamic=True)
    for rows in (5, 7, 12):  # not 4: a first batch as large as the features makes Dynamo tie the two
        assert close(fast(floats(rows)), fast.original(floats(rows)))
    assert len(fast.graphs) == 1


def test_never_dynamic():
    fast = compiled(linear(), dynamic=False)
    for rows in (4, 7, 12):
        fast(floats(rows))
    assert len(fast.graphs) == 3


def test_train_eval_train():
    model = nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(0.5))
    fast = compiled(model)
    fast.train()(floats()).sum().backward()
    fast.eval()
    once, twice = fast(floats()), fast(floats())
    assert torch.equal(once, twice)
    assert close(once, model(floats()))
    fast.train()
    fast(floats()).sum().backward()
    assert int(model[1].num_batches_tracked) == 2


def test_without_gradients():
    model = linear()
    fast = compiled(model)
    with torch.no_grad():
        out = fast(square())
    assert not out.requires_grad
    assert close(out, model(floats()).detach())
    with torch.inference_mode():
        inferred = fast(floats())
    assert inferred.is_inference()
    assert torch.equal(inferred, out)
    trained = fast(square())
    assert trained.requires_grad
    assert torch.equal(trained.detach(), out)
    trained.sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("warm", [False, True], ids=["first", "after a step"])
def test_the_graph_of_a_call_can_be_kept(warm):
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    fast = compiled(model)
    if warm:
        fast(floats()).sum().backward()
        model.zero_grad()
    loss = fast(floats()).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for first, parameter in zip(once, model.parameters(), strict=True):
        assert torch.equal(parameter.grad, 2 * first)


def test_backward_twice_without_keeping_fails_as_without_us():
    fast = compiled(nn.Sequential(linear(), nn.Tanh()))
    loss = fast(floats()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("warm", [False, True], ids=["first", "after a step"])
def test_double_backward_works_or_says_so(warm):
    fast = compiled(nn.Sequential(linear(), nn.Tanh()))
    if warm:
        fast(square()).sum().backward()
    x = square()
    try:
        (gradient,) = torch.autograd.grad(fast(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    except RuntimeError as error:
        assert "double backward" in str(error)  # noqa: PT017
    else:
        y = square()
        (gradient,) = torch.autograd.grad(fast.original(y).sum(), y, create_graph=True)
        gradient.square().sum().backward()
        assert torch.allclose(x.grad, y.grad, rtol=2**-4, atol=2**-4)


# --------------------------------------------------------------------------------- the user's autocast


@pytest.mark.parametrize("autocast", [BF16, FP16], ids=str)
def test_inside_the_users_autocast_the_policy_wins(autocast):
    def run(fast: AmpModule, inside: bool) -> tuple[Tensor, Tensor]:
        x = square()
        if inside:
            with torch.autocast("cpu", autocast):
                out = fast(x)
                out.sum().backward()
        else:
            out = fast(x)
            out.sum().backward()
        return out, x.grad

    model = nn.Sequential(linear(), nn.GELU(), linear())
    options: dict[str, Any] = dict(exclude=["2"])
    fast = compiled(model, "O1", **options)
    with pytest.warns(AmpWarning, match=r"own policy wins.*enabled = False") as caught:
        found = [run(fast, True) for _ in range(3)]
    assert len([w for w in caught if w.category is AmpWarning]) == 1
    expected = run(compiled(model, "O1", **options), False)
    after = run(fast, False)
    for out, gradient in (*found, after):
        assert out.dtype is expected[0].dtype
        assert torch.equal(out, expected[0])
        assert torch.equal(gradient, expected[1])
    assert [r.precision for r in fast.report(0).rows] == ["bfloat16", "float32", "float32"]


def test_autocast_is_as_it_was_after_a_call():
    fast = compiled(linear())
    with torch.autocast("cpu", FP16), warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        fast(floats())
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is FP16
        assert (floats() @ floats()).dtype is FP16
    assert not torch.is_autocast_enabled("cpu")


def test_a_backward_inside_an_autocast_that_the_forward_was_not_in():
    fast = compiled(nn.Sequential(linear(), nn.GELU(), linear()), "O1", exclude=["2"])
    x, y = square(), square()
    fast(x).sum().backward()
    loss = fast(y).sum()
    with torch.autocast("cpu", FP16):
        loss.backward()
    assert torch.equal(x.grad, y.grad)


# -------------------------------------------------------------------------------------- code that raises


class Refused(Exception):
    """An exception class that torch does not know."""


@pytest.mark.parametrize("error", [ValueError, Refused, StopIteration])
def test_an_exception_in_forward_is_the_users_own(error):
    def code(x: Tensor, fail: bool) -> Tensor:
        y = x @ x
        if fail:
            raise error("mine")
        return y + 1

    fast = compiled(code)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpWarning)
        for _ in range(2):
            with pytest.raises(error, match="mine"):
                fast(floats(), True)
            assert close(fast(floats(), False), code(floats(), False))
    told = [w for w in caught if w.category is AmpWarning]
    assert fast.report().rows or told, "from then on it runs in fp32, without a word"


def test_a_wrong_shape_is_torchs_own_error():
    fast = compiled(linear())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(3x5 and 4x4\)$"):
            fast(torch.randn(3, 5))
    assert close(fast(floats()), fast.original(floats()))
    assert fast.report().by_precision["bfloat16"] == 1
    assert len(fast.graphs) == 1
    with pytest.raises(TypeError):
        fast()


def test_a_wrong_dtype_once_does_not_stop_the_capture():
    fast = compiled(linear())
    with pytest.raises(RuntimeError, match="dtype"):
        fast(floats().double())
    assert close(fast(floats()), fast.original(floats()))
    assert fast.report().by_precision["bfloat16"] == 1


# ------------------------------------------------------------------------------- code that is no graph


def with_item(x: Tensor) -> Tensor:
    y = x @ x
    if y.sum().item() > 1e9:
        y = y + 1
    return y @ x


def with_branch(x: Tensor) -> Tensor:
    y = x @ x
    if y.sum() > 1e9:
        y = y + 1
    return y @ x


def with_print(x: Tensor) -> Tensor:
    y = x @ x
    print(end="")
    return y @ x


def with_numpy(x: Tensor) -> Tensor:
    y = x @ x
    z = torch.from_numpy(y.detach().numpy() * 2)
    return z @ x


def with_generator(x: Tensor) -> Tensor:
    def products():
        for i in range(2):
            yield x @ x + i

    return sum(products())


def with_list(x: Tensor) -> Tensor:
    return (x @ x) * len((x @ x).tolist())


UNTRACEABLE = [with_item, with_branch, with_print, with_numpy, with_generator, with_list]


@pytest.mark.parametrize("code", UNTRACEABLE, ids=lambda f: f.__name__)
def test_code_that_is_no_single_graph_works(code):
    fast = compiled(code)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        for _ in range(2):
            out = fast(floats())
    expected = code(floats())
    assert out.dtype is expected.dtype
    assert torch.allclose(out, expected, rtol=2**-4, atol=2**-2)
    assert "bfloat16" in fast.report().by_precision


@pytest.mark.parametrize("code", [with_item, with_branch, with_print], ids=lambda f: f.__name__)
def test_the_report_says_where_the_graph_broke(code):
    fast = compiled(code)
    fast(floats())
    report = fast.report()
    assert len(fast.graphs) == 2
    assert [r.precision for r in report.rows if r.op == "matmul"] == ["bfloat16"] * 2
    (reason,) = report.not_captured
    start = inspect.getsourcelines(code)[1]
    place = next(n for n in range(start + 2, start + 4) if f"test_bad_input.py:{n}" in reason)
    line = inspect.getsource(code).splitlines()[place - start].strip()
    assert line in reason
    assert "graph break" in reason
    assert reason in " ".join(str(report).split()), "wrapped at spaces"
    fast(floats())
    assert fast.report().not_captured == report.not_captured


def test_gradients_flow_through_a_break():
    ours, theirs = square(), square()
    compiled(with_print)(ours).sum().backward()
    with_print(theirs).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, rtol=2**-4, atol=2**-2)


@pytest.mark.parametrize("code", [with_item, with_branch, with_print], ids=lambda f: f.__name__)
def test_fullgraph_on_such_code_says_what_to_do(code):
    fast = compiled(code, fullgraph=True)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"fullgraph=True.*Leave fullgraph off.*out of forward"):
            fast(floats())


def test_fullgraph_on_one_graph_works():
    assert close(compiled(linear(), fullgraph=True)(floats()), linear()(floats()))


def test_a_model_that_nothing_can_be_captured_of_warns_once():
    @torch._dynamo.disable
    def hidden(x: Tensor) -> Tensor:
        return x @ x

    class Opaque(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return hidden(x)

    fast = compiled(Opaque())
    with pytest.warns(AmpWarning, match="no tensor op was captured") as caught:
        outs = [fast(floats()) for _ in range(3)]
    assert len([w for w in caught if w.category is AmpWarning]) == 1
    low = floats().to(BF16)
    assert all(torch.equal(out, hidden(low).float()) for out in outs)
    assert fast.report().not_captured
    assert "no tensor op was captured" in str(fast.report())


def test_a_generator_function():
    def products(x: Tensor):
        for i in range(2):
            yield x @ x + i

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        found = list(compiled(products)(floats()))
    for ours, theirs in zip(found, products(floats()), strict=True):
        assert close(ours, theirs)


# -------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: amp_compile(nn.Linear), "not the class Linear"),
        (lambda: amp_compile("model"), "not str 'model'"),
        (lambda: amp_compile(3), "not int 3"),
        (lambda: amp_compile(linear(), "O22"), "Unknown level 'O22'.*'O2'"),
        (lambda: amp_compile(linear(), level="o1"), "'O1'"),
        (lambda: amp_compile(linear(), backend="inductr"), "Unknown backend 'inductr'.*inductor"),
        (lambda: amp_compile(linear(), backend=None), "Unknown backend None"),
        (lambda: amp_compile(linear(), exclude="encoder"), r"exclude must be a list.*\['encoder'\]"),
        (lambda: amp_compile(linear(), exclude=nn.Linear), "exclude must be a list"),
        (lambda: amp_compile(linear(), disable_passes=["fold_cast"]), "'fold_casts'"),
        (lambda: amp_compile(linear(), disable_passes="fold_casts"), r"\['fold_casts'\]"),
        (lambda: amp_compile(linear(), dtype=torch.float32), "O0"),
        (lambda: amp_compile(linear(), dtype=torch.float64), "float16 or torch.bfloat16"),
        (lambda: amp_compile(linear(), dtype="int8"), "float16 or torch.bfloat16"),
        (lambda: amp_compile(amp_compile(linear())), "compiled already.*original"),
        (lambda: amp_compile(linear(), policy="O2"), "must be an amp_compiler.Policy"),
        (lambda: amp_compile(linear(), white_list=["liner"]), "Did you mean 'linear'"),
        (lambda: amp_compile(backend="inductr"), "Unknown backend 'inductr'"),
        (lambda: amp_compile(dtype=torch.float32), "O0"),
        (lambda: amp_compile(disable_passes=["fold_cast"]), "'fold_casts'"),
        (lambda: amp_compile(linear(), exclude=3), "exclude must be a list"),
        (lambda: amp_compile(linear(), exclude=None), "exclude must be a list"),
        (lambda: amp_compile(linear(), disable_passes=None), "list of names"),
        (lambda: amp_compile(linear(), dynamic="yes"), "dynamic"),
        (lambda: amp_compile(linear(), fullgraph="no"), "fullgraph"),
    ],
)
def test_wrong_arguments(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("AMP_CPU_KERNELS", "auto, native, wide, python"),
        ("AMP_GPU_KERNELS", "triton, torch"),
        ("AMP_CPU_CAPABILITY", "native, avx512, avx2, baseline"),
        ("AMP_CUDA_AUTOTUNE", "0, 1"),
        ("AMP_VERIFY", "deep"),
        ("AMP_LOGS", "passes, casts, capture, all, quiet"),
    ],
)
def test_a_wrong_environment_variable_is_told_before_anything_runs(name, values, monkeypatch):
    monkeypatch.setenv(name, "fastest")
    with pytest.raises(ArgumentError, match=f"{name}='fastest'.* is not one of: {values}\\. Correct it, or unset it"):
        amp_compile(linear())
    monkeypatch.setenv(name, "")  # as in a shell script that clears it
    fast = amp_compile(linear())
    assert close(fast(floats()), linear()(floats()))
    assert not fast.report().notes


def test_a_module_that_is_compiled_already_inside_another():
    """What is inside keeps its own policy, or the call says that it cannot."""
    inner = compiled(linear(), "O0")
    try:
        outer = compiled(nn.Sequential(inner, linear()))
        out = outer(floats())
    except AmpError as error:
        assert "already" in str(error)  # noqa: PT017
    else:
        assert close(out, linear()(linear()(floats())))


@pytest.mark.parametrize("name", ["normalize", "assign_precision", "insert_casts", "fold_casts"])
def test_each_pass_can_be_switched_off(name):
    fast = compiled(nn.Sequential(linear(), nn.GELU()), disable_passes=[name])
    assert close(fast(floats()), fast.original(floats()))
    records = [r for r in fast.history if r.name == name]
    assert records
    assert all(r.note == "switched off" and not r.modified for r in records)
