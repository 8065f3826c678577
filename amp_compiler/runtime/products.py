"""Matrix products and convolutions in code that is not captured: which of them run low, and which values are wide."""

from __future__ import annotations

import linecache
import threading
from typing import Any

import torch
from torch import Tensor

from ..capture import frames
from ..common.messages import users_code
from ..common.torch_names import pytree
from ..ir import LOW_DTYPES
from ..ir.flops import PRODUCTS
from ..policy import Policy
from ..policy.ops.names import FUNCTION_NAMES
from ..policy.ops.row import OpClass
from ..policy.scopes import Surroundings
from .state import State

frames.belongs_to_us(__file__)


class Around(threading.local):
    """The module around plain code, and the precision that was set for it."""

    path: str = ""
    dtype: torch.dtype | None = None


class PlainProducts:
    """What is known about the products in one model's plain code."""

    def __init__(self, policy: Policy, state: State) -> None:
        self.policy, self.state = policy, state
        self.around = Around()
        self._lowers: dict[Any, bool] = {}
        self._wide_makers: dict[Any, bool] = {}
        self._notes_wide = policy.keeps_wide
        self._told: set[Any] = set()

    def low_for(self, function: Any) -> torch.dtype | None:
        """Return the dtype for a product in plain code; None if it isn't a product or should be left alone."""
        if not self._is_low(function) or self.users_autocast():
            return None
        return self.low_here()

    def low_here(self) -> torch.dtype | None:
        """Return the low-precision dtype at this place of the model's code; None if the place asks for fp32."""
        region = self.state.running.entered.region_since()
        dtype = self.policy.low
        if region is not None and region[0] == "precision":
            dtype = region[1] or torch.float32
        elif self.around.dtype is not None:
            dtype = self.around.dtype
        return dtype if dtype in LOW_DTYPES else None

    def users_autocast(self) -> bool:
        """True if the model's code has opened a ``torch.autocast`` region of its own."""
        return Surroundings.now().autocasts > self.state.running.entered.autocasts

    def _is_low(self, function: Any) -> bool:
        known = self._lowers.get(function)
        if known is None:
            name = _op_name(function)
            known = name in PRODUCTS and self.policy.classify(name).cls is OpClass.LOW
            self._lowers[function] = known
        return known

    def note_wide(self, function: Any, given: Any, result: Any) -> None:
        """Record results that are wide (``wide.py``), for the graphs that read them: plain code runs in fp32, and a
        graph that treats its results as low would round them."""
        if not self._notes_wide:
            return
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.dtype is torch.float32]
        if not made:
            return
        handed = self.state.handed
        why = next((why for t in pytree.tree_leaves(given) if isinstance(t, Tensor) and (why := handed.why(t))), "")
        if not why and self._makes_wide(function):
            why = f"the fp32 result of {_op_name(function)}, in code that is not captured"
        for value in made if why else ():
            handed.add(value, why)

    def _makes_wide(self, function: Any) -> bool:
        known = self._wide_makers.get(function)
        if known is None:
            choice = self.policy.classify(_op_name(function))
            known = choice.cls is OpClass.FP32 and not (choice.row is not None and choice.row.fp32_inside)
            self._wide_makers[function] = known
        return known

    def is_in_place_product(self, function: Any, result: Any) -> bool:
        """True for ``addmm_`` in fp32, which autocast leaves alone."""
        name = str(getattr(function, "__name__", ""))
        if not name.endswith("_") or name.endswith("__") or name.removesuffix("_") not in PRODUCTS:
            return False
        return isinstance(result, Tensor) and result.dtype is torch.float32 and self.low_here() is not None

    def stays_wide(self, function: Any, why: str = "") -> None:
        """Report that a product in plain code ran in fp32, once per place."""
        frame = users_code()
        place = function, frame.f_code, frame.f_lineno
        if place not in self._told:
            self._told.add(place)
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self.state.leave(
                f"{function.__name__} runs in float32, because it is in code that is not captured and "
                f"{why or 'torch.autocast does not make it low'}: in {self.around.path or 'the model'}, "
                f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}: {line}"
            )


def _op_name(function: Any) -> str:
    """Return the name of the op that a torch function or a tensor method runs."""
    name = str(getattr(function, "__name__", ""))
    if name in FUNCTION_NAMES:
        return FUNCTION_NAMES[name]
    if name.startswith("__") and name.endswith("__"):  # __pow__, __rpow__, __rmatmul__
        plain = name.strip("_")
        return {"rmatmul": "matmul", "rpow": "pow"}.get(plain, plain)
    return name
