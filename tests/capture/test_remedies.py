"""Advice against graph breaks can be typed as it stands, and helps."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from amp_compiler import amp_compile, compile_train_step
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


def test_a_training_step_that_runs_in_pieces_says_so_too() -> None:
    model = Model(logs, looped=False)
    step = compile_train_step(
        model, lambda out, target: (out - target).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1),
        dtype=torch.bfloat16, backend="eager",
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"logging\.getLogger\('my\.model'\)\.warning"):
        step(torch.ones(2, 4), torch.ones(2, 2))
