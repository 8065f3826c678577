"""``search_policy``: find the policy with the most low-precision work that keeps a user's own metric."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from .calibration.calibration import Calibration
from .calibration.result import Search
from .calibration.search import run_search
from .common.errors import ArgumentError
from .compile import amp_compile
from .cost.device import Device
from .module import AmpModule
from .policy import Policy
from .runtime.captured import Captured


def search_policy(
    model: nn.Module,
    evaluate: Callable[[AmpModule], float],
    *,
    tolerance: float,
    maximize: bool = True,
    dtype: torch.dtype | str = torch.float16,
    level: str = "O3",
    calibration: Calibration | None = None,
    objective: str | Device = "flops",
    budget: int = 50,
    journal: str | os.PathLike[str] | None = None,
) -> Search:
    """Find the policy that runs the most work in low precision and keeps ``evaluate`` within a tolerance of fp32.

    Everything that the level allows is tried first. If that fails, the ops are ordered by how dangerous low precision
    is for them, the largest harmless part of that order is found by bisection, and the rest is added back group by
    group; without a calibration, modules come before single ops. The result was evaluated once more by itself.

    Args:
        model: The fp32 model. It is not modified: what ``evaluate`` changes in it is restored.
        evaluate: A function that gets a compiled model, calls it on the user's data, and returns the metric. NaN means
            that the model does not work. It should give the same value for the same model; if it does not, trials are
            repeated, and the result holds with 95 % confidence.
        tolerance: How much worse than fp32 the metric may be, in its own unit.
        maximize: True if a larger metric is better, such as an accuracy; False for a loss.
        dtype: The low-precision dtype.
        level: The level to start from, usually ``"O3"``: everything low.
        calibration: What ``calibrate`` measured on the same model. It puts the ops in order, and usually halves the
            number of evaluations or better.
        objective: What counts as work: ``"flops"`` of products and convolutions, ``"bytes"`` of results, or a device
            as ``predict`` takes it, such as ``"a100_80"``: the seconds that each op saves there in low precision, by
            the cost model, without the casts around it.
        budget: How often ``evaluate`` may be called.
        journal: A file to which every evaluation is written at once. A search that is started again with the same file
            continues where it was stopped.

    Returns:
        A ``Search``: ``.policy``, ``.metric``, ``.baseline``, ``.trials``, ``.report()``.

    Raises:
        SearchError: If ``evaluate`` fails or is too noisy for the tolerance, or the journal cannot be used.

    Examples:
        >>> import torch
        >>> from amp_compiler import search_policy
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        ...         torch.nn.init.constant_(self.a.weight, 1.0)
        ...     def forward(self, x):
        ...         return self.b(self.a(1e4 * x) * 1e-4)  # a's results do not fit fp16
        >>> model, x = Net().eval(), torch.ones(2, 8)
        >>> with torch.no_grad():
        ...     expected = model(x)
        >>> def evaluate(compiled):
        ...     with torch.no_grad():
        ...         return (compiled(x) - expected).abs().max()
        >>> search = search_policy(model, evaluate, tolerance=0.01, maximize=False)
        >>> [row.name for row in search.report().rows], search.share
        (['a:linear#0', ':mul#1'], 0.5)
    """
    if isinstance(model, AmpModule):
        raise ArgumentError("search_policy takes the fp32 model: pass module.original.")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"search_policy takes a torch.nn.Module, not {type(model).__name__}.")
    return run_search(
        model, _Compiler(model), evaluate, tolerance=tolerance, maximize=maximize, dtype=dtype, level=level,
        calibration=calibration, objective=objective, budget=budget, journal=journal,
    )  # fmt: skip


class _Compiler:
    """Compiles a model by one policy after another. What was captured for one is used for the next, where the model is
    captured as a whole."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.captured: Captured | None = None

    def __call__(self, policy: Policy) -> AmpModule:
        made: AmpModule = amp_compile(self.model, policy=policy)
        if not policy.rewrites:
            return made
        again = self.captured.by(made._options) if self.captured is not None else None
        made._begin(again)
        self.captured = made._compiled
        self.captured.keep_graphs()
        return made
