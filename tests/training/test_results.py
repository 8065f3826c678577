"""What a step gives back beside the loss: the rest of what the loss function gave, and the model's output."""

from __future__ import annotations

import math
import traceback
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_compiler import Policy, compile_train_step
from amp_compiler.common.errors import AmpWarning, ArgumentError
from helpers import BF16, F16, LOW
from training_helpers import batches, differences, sgd, state

GOOD = batches(4, (5, 3), (5, 2))
X, Y = GOOD[0]


class Network(nn.Module):
    """``way``: "pieces" breaks the graph after the first layer, "checkpoint" computes that layer again."""

    def __init__(self, way: str = "whole") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last, self.way = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2), way

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        h = checkpoint(self.body, x, use_reentrant=False) if self.way == "checkpoint" else self.body(x)
        if self.way == "pieces":
            torch._dynamo.graph_break()
        return self.last(h) * factor

    def body(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).relu()


def start(model: nn.Module, loss_fn: Any, **kwargs: Any) -> Any:
    options = {"level": "O2", "dtype": BF16, "backend": "eager", **kwargs}
    return compile_train_step(model, loss_fn, sgd(model.parameters()), **options)


def measured(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    hits = output.argmax(-1) == target.argmax(-1)
    return F.mse_loss(output, target), {
        "hits": hits.sum(), "share": hits.float().mean(), "logits": output, "pair": [output[:1], "a word"],
        "none": None, "double": output.double().sum(),
    }  # fmt: skip


def is_plain(value: Tensor) -> bool:
    return not value.requires_grad and value.grad_fn is None


# ----------------------------------------------------------------------------------------- loss and the rest


@pytest.mark.filterwarnings("ignore:.*not one graph")
@pytest.mark.parametrize(
    ("way", "dtype", "kwargs"),
    [
        ("whole", F16, {"accumulate_steps": 2}), ("checkpoint", F16, {}), ("pieces", BF16, {"accumulate_steps": 2}),
        ("whole", BF16, {"level": "O1", "loss_scaler": None}),
        ("whole", BF16, {"policy": Policy.torch("cpu", BF16), "level": "O2"}),
        ("pieces", BF16, {"policy": Policy.torch("cpu", BF16), "level": "O2"}),
    ],
)  # fmt: skip
def test_the_rest_of_what_the_loss_function_gives(way: str, dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    """Detached, in the dtypes of the fp32 model, and nothing of the training changes because of it."""
    model, twin = Network(way), Network(way)
    if "policy" in kwargs:
        kwargs = {key: value for key, value in kwargs.items() if key != "level"} | {"level": kwargs["policy"].level}
        dtype = kwargs["policy"].dtype
    step = start(model, measured, dtype=dtype, return_output=True, **kwargs)
    plain = start(twin, lambda output, target: measured(output, target)[0], dtype=dtype, **kwargs)
    for x, y in GOOD:
        with torch.no_grad():
            _, expected = measured(model(x), y)
        result, other = step(x, y), plain(x, y)
        assert float(result.loss) == float(other.loss)
        assert (other.extra, other.output) == (None, None)
        extra = result.extra
        assert list(extra) == list(expected)
        assert extra["none"] is None
        assert extra["pair"][1] == "a word"
        tensors = {k: v for k, v in extra.items() if isinstance(v, Tensor)} | {"first": extra["pair"][0]}
        wanted = {**expected, "first": expected["pair"][0]}
        assert all(is_plain(t) for t in (*tensors.values(), result.output))
        assert {k: t.dtype for k, t in tensors.items()} == {k: wanted[k].dtype for k in tensors}
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0.05, atol=0.05)
        torch.testing.assert_close(result.output, expected["logits"], rtol=0.05, atol=0.05)
    assert differences(state(model), state(twin)) == []
    assert (step.joint_graphs == []) == (way == "pieces")


Pair = namedtuple("Pair", "loss logits")


@dataclass
class Answer:
    loss: Tensor
    logits: Tensor
    note: str = "kept"
    parts: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slots:
    loss: Tensor
    logits: Tensor


class Foreign:
    """What a cache is: an object that nobody who trains asks for."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def hf_output(loss: Tensor, logits: Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=Foreign(logits))


def is_logits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == (5, 2) and value.dtype == torch.float32 and is_plain(value)


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], bool]]] = {
    "tensor": (lambda loss, logits: loss, lambda extra: extra is None),
    "alone": (lambda loss, logits: (loss,), lambda extra: extra is None),
    "pair": (lambda loss, logits: (loss, logits), is_logits),
    "list": (lambda loss, logits: [loss, logits], is_logits),
    "number": (lambda loss, logits: (loss, 3), lambda extra: extra == 3),
    "triple": (lambda loss, logits: (loss, logits, 7), lambda extra: is_logits(extra[0]) and extra[1:] == (7,)),
    "dict": (lambda loss, logits: {"loss": loss, "out": (logits,)}, lambda extra: is_logits(extra["out"][0])),
    "ordered": (lambda loss, logits: OrderedDict(a=logits, loss=loss), lambda e: set(e) == {"a"} and is_logits(e["a"])),
    "namedtuple": (Pair, lambda extra: list(extra) == ["logits"] and is_logits(extra["logits"])),
    "dataclass": (lambda loss, logits: Answer(loss, logits, parts=[logits]), lambda extra: extra is None),
    "slots": (Slots, lambda extra: extra is None),
    "ModelOutput": (hf_output, lambda extra: extra is None),
}


class Returns(Network):
    """A model that makes its own loss."""

    def __init__(self, kind: str, way: str) -> None:
        super().__init__(way)
        self.make = KINDS[kind][0]

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = super().forward(x)
        return self.make(F.mse_loss(logits, labels), logits)


@pytest.mark.filterwarnings("ignore:.*not one graph")
@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "whole") for kind in KINDS), ("pair", "pieces"), ("dataclass", "pieces"), ("slots", "pieces")],
)
def test_kinds_of_answers(kind: str, way: str) -> None:
    """From a model with its own loss. Of an object, only the loss is taken: logits and caches cost memory and casts."""
    if kind == "ModelOutput":
        pytest.importorskip("transformers")
    step = start(Returns(kind, way), None, level="O0" if way == "pieces" else "O2", return_output=kind != "ModelOutput")
    result = step({"x": X, "labels": Y})
    assert KINDS[kind][1](result.extra)
    assert result.loss.shape == ()
    assert (step.joint_graphs == []) == (way == "pieces")
    if kind != "ModelOutput":
        made = KINDS[kind][0](torch.ones(()), torch.ones(5, 2))
        assert type(result.output) is type(made)
    if kind in ("dataclass", "slots"):
        assert is_plain(result.output.logits)
    if kind == "dataclass":
        assert is_plain(result.output.parts[0])


def test_the_output_of_a_transformers_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertForSequenceClassification(config)
    step = start(model, None, return_output=True)
    inputs = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.tensor([0, 1])}
    result = step(inputs)
    assert type(result.output).__name__ == "SequenceClassifierOutput"
    assert result.extra is None
    assert result.output.logits.dtype == torch.float32
    assert float(result.output.loss) == float(result.loss)
    assert len(step.joint_graphs) == 1


def test_an_object_of_a_loss_function() -> None:
    step = start(Network("whole"), lambda output, target: Answer(F.mse_loss(output, target), output, parts=[output]))
    extra = step(X, Y).extra
    assert set(extra) == {"logits", "note", "parts"}
    assert extra["note"] == "kept"
    assert is_logits(extra["logits"])
    assert is_logits(extra["parts"][0])


def test_sizes_and_parameters_among_the_rest() -> None:
    """A number that changes with the batch, a parameter, a buffer, and the input itself."""

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        given = {"rows": output.shape[0], "weight": model.last.weight, "target": target, "complex": output + 1j}
        return F.mse_loss(output, target), given

    model = Network()
    step = start(model, loss_fn)
    for rows in (5, 4, 3):
        extra = step(X[:rows], Y[:rows]).extra
        assert extra["rows"] == rows
        assert torch.equal(extra["target"], Y[:rows])
        assert torch.equal(extra["weight"], model.last.weight)
        assert is_plain(extra["weight"])
        assert is_plain(extra["complex"])
    assert len(step.joint_graphs) <= 2


def test_what_flush_and_a_skipped_update_give() -> None:
    model = Network()
    step = start(model, measured, accumulate_steps=2, dtype=F16, return_output=True)
    step(X, Y)
    flushed = step.flush()
    assert (flushed.extra, flushed.output) == (None, None)
    step(X, Y)
    result = step(torch.full_like(X, math.inf), Y)
    assert bool(result.skipped)
    assert bool(result.extra["logits"].isnan().all())
    assert "norm" in str(step.explain_overflow()) or step.explain_overflow().phase == "input"


# ---------------------------------------------------------------------------------------------------- errors


def told(loss_fn: Any, x: Tensor = X, y: Any = Y) -> tuple[Exception, str]:
    """The error that a user meets, and all that Python prints of it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        start(Network(), loss_fn)(x, y)
    return caught.value, "".join(traceback.format_exception(caught.value))


def one_argument(output: Tensor) -> Tensor:
    return output.sum()


def three_arguments(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return output.sum()


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (one_argument, ("one_argument", "test_results.py", "loss_fn(output, targets)")),
        (three_arguments, ("three_arguments", "weight")),
        (nn.MSELoss, ("MSELoss()",)),
    ],
)
def test_a_loss_function_that_cannot_be_called(loss_fn: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        start(Network(), loss_fn)
    assert all(word in str(caught.value) for word in words)


def test_loss_functions_that_can() -> None:
    def defaults(output: Tensor, target: Tensor, weight: float = 0.5) -> Tensor:
        return F.mse_loss(output, target) * weight

    def anything(*values: Any, **options: Any) -> Tensor:
        return F.mse_loss(*values, **options)

    for loss_fn in (defaults, anything, nn.MSELoss(), F.mse_loss, torch.dist, None):
        start(Network(), loss_fn)


def rows_do_not_fit(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.zeros(3, dtype=torch.long))


def sizes_do_not_fit(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:3]).sum()  # the user's line


@pytest.mark.filterwarnings("ignore:.*not one graph")
def test_a_mistake_in_the_loss_function_is_the_users_own_exception() -> None:
    error, text = told(rows_do_not_fit)
    assert (type(error), str(error)) == (ValueError, "Expected input batch_size (5) to match target batch_size (3).")
    error, text = told(sizes_do_not_fit)
    assert type(error) is RuntimeError
    assert "must match the size" in str(error)
    assert "# the user's line" in text
    for word in ("BackendCompilerFailed", "Dynamo", "direct cause", "During handling"):
        assert word not in text


@pytest.mark.filterwarnings("ignore:.*not one graph")
def test_a_loss_of_a_wrong_shape() -> None:
    for loss_fn, words in (
        (lambda output, target: output, ("[5, 2]", "mean or sum", "test_results.py")),
        (lambda output, target: (output, target), ("[5, 2]", "mean or sum")),
        (lambda output, target: {"total": output.sum()}, ("dict", '"loss"')),
        (lambda output, target: None, ("NoneType",)),
    ):
        error, text = told(loss_fn)
        assert isinstance(error, ArgumentError)
        assert all(word in str(error) for word in words), str(error)
        assert "BackendCompilerFailed" not in text


def test_a_batch_that_does_not_fit_later_changes_nothing() -> None:
    model = Network()
    step = start(model, F.mse_loss)
    step(X, Y)
    before = state(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        step(torch.zeros(5, 7), Y)
    assert "Dynamo" not in "".join(traceback.format_exception(caught.value))
    assert differences(state(model), before) == []
    step(X, Y)
    assert len(step.joint_graphs) == 1


# --------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", LOW, ids=["bf16", "f16"])
def test_numbers_that_change_at_every_call(dtype: torch.dtype) -> None:
    """A temperature among the inputs and a weight among the targets: one graph for all values, right for each."""

    def loss_fn(output: Tensor, target: tuple[Tensor, float]) -> Tensor:
        return F.mse_loss(output, target[0]) * target[1]

    model = Network()
    step = compile_train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), dtype=dtype, backend="eager")
    for i in range(1, 8):
        factor, weight = 0.3 * i, 1 / i
        result = step({"x": X, "factor": factor}, (Y, weight))
        expected = loss_fn(model(X, factor), (Y, weight))
        assert float(result.loss) == pytest.approx(float(expected.detach()), rel=0.02)
        (gradient,) = torch.autograd.grad(expected, [model.last.bias])
        torch.testing.assert_close(model.last.bias.grad, gradient, rtol=0.05, atol=0.02)
    assert step.report().notes == ()
    assert len(step.joint_graphs) <= 3


class Cautious(Network):
    """Reads dtypes, so it is traced in low precision too."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        h = self.first(x)
        return self.last((h.float() * factor).to(h.dtype)) + torch.finfo(h.dtype).eps


def test_a_number_in_code_that_reads_dtypes() -> None:
    model = Cautious()
    step = start(model, F.mse_loss)
    for i in range(1, 4):
        expected = float(F.mse_loss(model(X, 0.3 * i), Y).detach())
        assert float(step({"x": X, "factor": 0.3 * i}, Y).loss) == pytest.approx(expected, rel=0.02)
    assert step.report().notes == ()
    assert len(step.joint_graphs) == 2


class Rate(Network):
    def forward(self, x: Tensor, rate: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * math.exp(-rate)


def test_a_number_that_dynamo_must_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python computes with it, so each value is another graph; there is a bound, a word of advice, and no crash."""
    from amp_compiler.capture import dynamo

    monkeypatch.setattr(dynamo, "RECOMPILE_LIMIT", 2)
    model = Rate()
    step = compile_train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0), level="O1", dtype=BF16)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for i in range(8):
            result = step({"x": X, "rate": 0.25 * i}, Y)
            assert float(result.loss) == pytest.approx(float(F.mse_loss(model(X, 0.25 * i), Y).detach()), rel=0.02)
    words = [str(w.message) for w in seen if issubclass(w.category, AmpWarning)]
    assert sum("torch.tensor" in text and "rate" in text for text in words) == 1
