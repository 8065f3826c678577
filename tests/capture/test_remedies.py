"""Advice against graph breaks can be typed as it stands, and helps."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from amp_compiler import AmpWarning, amp_compile, compile_train_step, precision
from amp_compiler.capture.remedies import Reason, remedy

logger = logging.getLogger("my.model")


def logs(x: Tensor) -> None:
    logger.warning("a value of %s", 3)


def logs_to_the_root(x: Tensor) -> None:
    logging.getLogger().info("a value")


def logs_by_a_function(x: Tensor) -> None:
    logging.info("a value")


def prints(x: Tensor) -> None:
    print("a value", 3)


def reads_a_number(x: Tensor) -> None:
    x.sum().item()


class Model(nn.Module):
    """Dynamo captures the first layer, breaks at ``between``, and captures the second; ``looped``: it gives up."""

    def __init__(self, between: Callable[[Tensor], None], looped: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.between, self.looped = between, looped

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + self.looped):
            x = self.first(x)
            self.between(x)
        return self.second(x)


def not_captured(model: nn.Module) -> tuple[str, ...]:
    torch._dynamo.reset()
    fast = amp_compile(model, dtype=torch.bfloat16, backend="eager")
    fast(torch.ones(2, 4))
    found: tuple[str, ...] = fast.report().not_captured
    return found


TYPED = {
    logs: "torch._dynamo.config.ignore_logging_functions.add(logging.getLogger('my.model').warning)",
    logs_to_the_root: "torch._dynamo.config.ignore_logging_functions.add(logging.getLogger().info)",
    prints: "torch._dynamo.config.reorderable_logging_functions.add(print)",
    reads_a_number: "torch._dynamo.config.capture_scalar_outputs = True",
}


@pytest.mark.parametrize(
    ("between", "looped"),
    [(logs, False), (logs, True), (logs_to_the_root, True), (prints, False), (reads_a_number, False)],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_what_the_advice_says_helps(between: Callable[[Tensor], None], looped: bool) -> None:
    config, typed = torch._dynamo.config, TYPED[between]
    with config.patch(
        ignore_logging_functions=set(config.ignore_logging_functions),
        reorderable_logging_functions=set(config.reorderable_logging_functions), capture_scalar_outputs=False,
    ):  # fmt: skip
        (told,) = not_captured(Model(between, looped))
        assert told.endswith(typed)
        exec(typed, {"torch": torch, "logging": logging, "print": print})
        assert not_captured(Model(between, looped)) == ()


def test_a_function_of_logging_is_named_from_the_code() -> None:
    (told,) = not_captured(Model(logs_by_a_function, looped=False))
    assert re.search(r"ignore_logging_functions\.add\(logging\.info\)", told)


def test_a_logger_that_dynamo_does_not_name() -> None:
    advice = remedy(Reason("logging.Logger method not supported\n  something else"))
    assert advice.endswith("add(logger.warning), with the method that the model calls")
    assert remedy("something new") == ""


@pytest.mark.parametrize(
    "line", ["if h.max().item() > 1:", "while float(h) > 0:", "x = x if h.item() else y", "assert int(h) == 2"]
)
def test_a_number_in_a_condition_is_a_branch(line: str) -> None:
    reason = Reason("Unsupported Tensor.item() call", f"model.py:3 in forward: {line}")
    assert reason.in_full().endswith("torch.where or torch.cond keeps it in one graph")
    elsewhere = Reason(reason, "model.py:3 in forward: x = h.item() * x if scaled else x")
    assert elsewhere.in_full().endswith("capture_scalar_outputs = True")


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        largest = x.max().item()
        if largest > 1:
            x = x + 1
        return x


def test_a_captured_number_in_a_condition_has_a_remedy_too() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        (told,) = not_captured(Branch())
    assert re.search(r"in forward: if largest > 1:\): .*torch\.where or torch\.cond", told)


class Scoped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with precision("float32"):
            x = self.layer(x)
            print("a value")
        return x


def test_a_break_inside_a_scope_names_its_line() -> None:
    torch._dynamo.reset()
    fast = amp_compile(Scoped(), dtype=torch.bfloat16, backend="eager")
    with pytest.warns(AmpWarning, match=r"The break: .*test_remedies\.py:\d+ in forward: print\(\"a value\"\)"):
        fast(torch.ones(2, 4))
    (told,) = fast.report().not_captured
    assert re.search(r"test_remedies\.py:\d+ in forward: print\(\"a value\"\)\): the model prints", told)


def prints_an_object(x: Tensor) -> None:
    print("a value", iter([x]))


def test_what_cannot_be_printed_later_has_a_remedy() -> None:
    config = torch._dynamo.config
    with config.patch(reorderable_logging_functions={*config.reorderable_logging_functions, print}):
        (told,) = not_captured(Model(prints_an_object, looped=False))
    assert "only tensors, constants and formatted strings of them can be printed" in told


def test_a_training_step_that_runs_in_pieces_says_so_too() -> None:
    model = Model(logs, looped=False)
    step = compile_train_step(
        model, lambda out, target: (out - target).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1),
        dtype=torch.bfloat16, backend="eager",
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"logging\.getLogger\('my\.model'\)\.warning"):
        step(torch.ones(2, 4), torch.ones(2, 2))
