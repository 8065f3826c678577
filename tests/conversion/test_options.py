"""Options of convert_model: lists, rules, dtypes of inputs and outputs, train mode, and arguments that are wrong."""

from __future__ import annotations

import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from amp_compiler import AmpWarning, Policy, convert_model, ir
from amp_compiler.common.errors import ArgumentError, CaptureError, PolicyError
from helpers import BF16, F16, F32

X = torch.randn(3, 4)


class Block(nn.Module):
    """Two linear layers, a softplus between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.softplus(self.first(x), beta=2))


def precisions(converted: Any) -> dict[str, str]:
    return {row.node: row.precision for row in converted.report().rows}


def weights(converted: Any) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in converted.exported_program.state_dict.items()}


def block(**options: Any) -> Any:
    return convert_model(Block().eval(), (X,), **{"dtype": BF16, **options})


def test_lists_modules_and_conditions() -> None:
    found = precisions(block(black_list=["linear"]))
    assert (found["linear"], found["linear_1"]) == ("float32", "float32")
    found = precisions(block(exclude=["first"]))
    assert (found["linear"], found["linear_1"]) == ("float32", "bfloat16")
    assert weights(block(exclude=["first"]))["first.weight"] is F32
    assert precisions(block(white_list=["softplus"], conditional_fp32_ops=[("softplus", "beta", [2])]))[
        "softplus"
    ] == "float32"
    assert precisions(block(white_list=["softplus"], conditional_fp32_ops=[("softplus", "beta", [1])]))[
        "softplus"
    ] == "bfloat16"


def test_a_policy_and_its_dtype() -> None:
    converted = convert_model(Block().eval(), (X,), policy=Policy("O1", F16))
    assert converted.policy == Policy("O1", F16)
    assert converted.report().level == "O1"
    assert weights(converted)["first.weight"] is F16


def test_the_default_dtype_on_a_cpu_is_bf16() -> None:
    assert convert_model(Block().eval(), (X,)).policy.low is BF16


def test_parameters_may_stay_fp32_and_casts_stay_in_the_graph() -> None:
    converted = block(cast_params=False)
    assert set(weights(converted).values()) == {F32}
    casts = [n for n in converted.exported_program.graph.nodes if ir.is_float_cast(n)]
    assert len(casts) >= 5  # four parameters and the input
    assert torch.equal(converted(X), block()(X))


def test_going_back_to_fp32() -> None:
    model = Block().eval()
    exact = convert_model(model, (X,), dtype=BF16, cast_params=False).remove_casts()
    assert exact.exact
    assert torch.equal(exact(X), model(X))
    rounded = convert_model(model, (X,), dtype=BF16).remove_casts()
    assert not rounded.exact
    assert set(rounded.rounded) == set(model.state_dict())
    low = {name: value.to(BF16).float() for name, value in model.state_dict().items()}
    assert torch.equal(rounded(X), torch.func.functional_call(model, low, (X,)))
    mixed = block(exclude=["first"]).remove_casts()
    assert set(mixed.rounded) == {"second.weight", "second.bias"}


@pytest.mark.parametrize("keep", [True, False])
def test_dtypes_of_inputs_and_outputs(keep: bool) -> None:
    converted = block(keep_io_dtypes=keep)
    x = X if keep else X.to(BF16)
    assert converted(x).dtype is (F32 if keep else BF16)
    program = converted.exported_program
    assert program.module()(x).dtype is (F32 if keep else BF16)
    assert program.example_inputs[0][0].dtype is x.dtype
    assert converted.report().casts == (4 if keep else 2)  # two around softplus


def test_an_input_that_is_also_read_in_fp32_is_asked_for_in_fp32() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc(x), x.float().exp()

    converted = convert_model(Both().eval(), (X,), dtype=BF16, keep_io_dtypes=False)
    assert [o.dtype for o in converted(X)] == [BF16, F32]


def test_o0_is_the_model_itself() -> None:
    model = Block().eval()
    converted = convert_model(model, (X,), level="O0")
    assert torch.equal(converted(X), model(X))
    assert set(weights(converted).values()) == {F32}


def test_a_model_in_train_mode_is_converted_as_in_eval_with_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9), nn.BatchNorm1d(4))
    model[1].eval()
    with pytest.warns(AmpWarning, match=r"train mode.*model.eval\(\)") as caught:
        converted = convert_model(model, (X,), dtype=BF16)
    assert caught[0].filename == __file__
    assert [m.training for m in model] == [True, False, True]
    assert torch.equal(converted(X), converted(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_model(model.eval(), (X,), dtype=BF16)


def test_a_failed_export_leaves_the_modes_as_they_were() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    model = Fails().train()
    with pytest.warns(AmpWarning), pytest.raises(CaptureError, match="Fails cannot be exported"):
        convert_model(model, (X,))
    assert model.training


def test_folding_can_be_switched_off() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4)).eval()
    off = convert_model(model, (X,), dtype=BF16, disable_passes=["fold_batch_norm", "remove_dropout"])
    assert [row.op for row in off.report().rows] == ["linear", "dropout", "batch_norm"]
    assert [row.op for row in convert_model(model, (X,), dtype=BF16).report().rows] == ["linear"]


def test_dropout_between_a_layer_and_its_norm_does_not_hinder_folding() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4)).eval()
    assert set(weights(convert_model(model, (X,), dtype=BF16))) == {"0.weight", "0.bias_folded"}


Pair = namedtuple("Pair", "a b")


@dataclass
class Named:
    logits: Tensor
    hidden: Any = None


class Gives(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.fc = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        if self.kind == "dataclass":
            return Named(y, [y + 1])
        if self.kind == "namedtuple":
            return Pair(y, {"inner": y + 1})
        return {"list": [y, None, 3], "tuple": (y,)} if self.kind == "nested" else y


@pytest.mark.parametrize("kind", ["dataclass", "namedtuple", "nested"])
def test_outputs_have_the_models_classes_in_memory_and_plain_ones_in_the_program(kind: str) -> None:
    if kind == "dataclass" and Named not in torch.utils._pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(Named)
    model = Gives(kind).eval()
    converted = convert_model(model, (X,), dtype=BF16)
    ours, theirs = converted(X), model(X)
    assert type(ours) is type(theirs)
    plain = converted.exported_program.module()(X)
    if kind == "dataclass":
        assert type(plain) is dict
        assert torch.equal(plain["logits"], ours.logits)
        assert torch.equal(plain["hidden"][0], ours.hidden[0])
    elif kind == "namedtuple":
        assert type(plain) is dict or type(plain) is tuple
        assert torch.equal(ours.b["inner"], (plain["b"] if isinstance(plain, dict) else plain[1])["inner"])
    else:
        assert plain["list"][1:] == ours["list"][1:] == [None, 3]


def test_under_inference_mode_no_grad_and_autocast() -> None:
    converted = block(dynamic_shapes={"x": {0: Dim("rows")}})
    expected = converted(X)
    assert not expected.requires_grad
    with torch.inference_mode():
        assert torch.equal(converted(X), expected)
    with torch.no_grad():
        assert torch.equal(converted(X), expected)
    with torch.autocast("cpu", F16):
        assert torch.equal(converted(X), expected)
    assert converted(torch.randn(7, 4)).shape == (7, 4)


def test_state_is_kept_between_calls_and_the_models_own_stays() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(()))
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.n.add_(1)
            return self.fc(x) * 0 + self.n

    model = Counts().eval()
    converted = convert_model(model, (X,), dtype=BF16)
    assert [converted(X)[0, 0].item() for _ in range(3)] == [1, 2, 3]
    assert model.n.item() == 0


def test_parameters_that_fp16_cannot_hold_are_reported() -> None:
    model = Block().eval()
    with torch.no_grad():
        model.first.weight[0, 0] = 70000.0
    converted = convert_model(model, (X,), dtype=F16)
    assert weights(converted) == {"first.weight": F32, "first.bias": F32, "second.weight": F16, "second.bias": F16}
    assert "first.weight stays in float32: its largest value 70000 overflows in float16" in converted.report().notes
    assert precisions(converted)["linear_1"] == "float16"
    small = X / 1000  # the result has to fit as well
    torch.testing.assert_close(converted(small), model(small), rtol=0.01, atol=0.01)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"args": X}, ArgumentError, r"write \(x,\)"),
    ({"args": {"x": X}}, ArgumentError, "a dict of inputs goes to kwargs"),
    ({"kwargs": [X]}, ArgumentError, "kwargs must be a dict"),
    ({"model": torch.relu}, ArgumentError, "takes a torch.nn.Module"),
    ({"level": "O9"}, ArgumentError, "Unknown level 'O9'"),
    ({"dtype": torch.int8}, ArgumentError, "dtype must be"),
    ({"black_list": ["liner"]}, ArgumentError, "Did you mean 'linear'"),
    ({"exclude": ["frist"]}, PolicyError, "Did you mean 'first'"),
    ({"conditional_fp32_ops": [("softplus", "gamma", [1])]}, PolicyError, "no argument 'gamma'"),
    ({"disable_passes": ["fold_batchnorm"]}, ArgumentError, "Did you mean 'fold_batch_norm'"),
    ({"model": nn.Linear(4, 4, device="meta")}, ArgumentError, "meta device"),
    ({"args": (torch.randn(3, 5),)}, CaptureError, "cannot be exported"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=[m for *_, m in WRONG])
def test_wrong_arguments_get_a_clear_message(given: dict[str, Any], error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"model": Block().eval(), "args": (X,), **given}
    with pytest.raises(error, match=message):
        convert_model(options.pop("model"), options.pop("args"), options.pop("kwargs", None), **options)
