"""Random programs with graph breaks, skipped frames and functions that must not be compiled.

Whatever is captured and whatever is not: no exception that fp32 does not raise, and ``Policy.torch`` gives the outputs
of ``torch.autocast``, bit by bit.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from end_to_end.test_random_programs import Program, Result, common, dtypes, programs, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amp_compiler import Policy, amp_compile

LOG = logging.getLogger("tests.random_uncaptured")
LOG.setLevel(logging.CRITICAL)


def skipped(expression: Callable[[], Tensor]) -> Tensor:
    """A frame that Dynamo gives up: the graph breaks inside a loop."""
    for _ in range(1):
        LOG.warning("skipped")
        result = expression()
    return result


@torch.compiler.disable
def foreign(expression: Callable[[], Tensor]) -> Tensor:
    """Other people's code."""
    return expression()


#: how a line ``name = expression`` may be written
STYLES = {
    "as it is": "{name} = {expression}",
    "graph break": "print('', end=''); {name} = {expression}",
    "skipped frame": "{name} = skipped(lambda: {expression})",
    "foreign call": "{name} = foreign(lambda: {expression})",
    "by a builtin": "{name} = functools.reduce(lambda _, f: f(), [lambda: {expression}], None)",
}


@dataclasses.dataclass(frozen=True)
class Broken(Program):
    """A program, each line of it in a style; ``whole``: its own frame is skipped, too."""

    styles: tuple[str, ...] = ()
    whole: bool = False

    def __str__(self) -> str:
        head = f"def program({', '.join(self.inputs)}):"
        body = ["for _ in range(1): LOG.warning('whole')"] if self.whole else []
        for line, style in zip(self.lines, self.styles, strict=True):
            name, expression = line.split(" = ", 1)
            body.append(STYLES[style].format(name=name, expression=expression))
        return "\n    ".join((head, *body, f"return ({', '.join(self.returns)},)"))

    __repr__ = __str__

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        scope: dict[str, Any] = {
            "torch": torch, "F": F, "skipped": skipped, "foreign": foreign, "functools": functools, "LOG": LOG,
        }  # fmt: skip
        exec(compile(str(self), "random_program.py", "exec"), scope)
        function: Callable[..., tuple[Tensor, ...]] = scope["program"]
        return function


@st.composite
def broken_programs(draw: st.DrawFn) -> Broken:
    program = draw(programs())
    styles = tuple(draw(st.sampled_from(tuple(STYLES))) for _ in program.lines)
    return Broken(program.lines, program.returns, program.seed, styles, draw(st.booleans()))


def runs_where_fp32_does(program: Broken, dtype: torch.dtype, level: str, keep: bool) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        if isinstance(run(program.function(), program), Exception):
            return
        ours = run(amp_compile(program.function(), level, dtype=dtype, keep_output_dtypes=keep), program)
    if isinstance(ours, Exception):
        raise AssertionError(f"only ours raises: {type(ours).__name__}: {ours}") from ours


def equals_autocast(program: Broken, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        theirs = run(program.function(), program, torch.autocast("cpu", dtype=dtype))
        policy = Policy.torch("cpu", dtype)
        ours = run(amp_compile(program.function(), policy=policy, keep_output_dtypes=False), program)
    same(program, ours, theirs)


def same(program: Broken, ours: Result, theirs: Result) -> None:
    if isinstance(theirs, Exception):
        return  # autocast refuses two dtypes in some ops; whether a piece does depends on where it ends
    if isinstance(ours, Exception):
        raise AssertionError(f"only ours raises: {type(ours).__name__}: {ours}") from ours
    for mine, yours in zip(ours[0], theirs[0], strict=True):
        assert mine.dtype is yours.dtype
        assert bool(((mine == yours) | (mine.isnan() & yours.isnan())).all()), f"{mine}\nagainst autocast's\n{yours}"
    words = re.findall(r"\w+", " ".join(program.lines))
    pairs: Sequence[tuple[str, Any, Any]] = list(zip(program.inputs, ours[1], theirs[1], strict=True))
    for leaf, mine, yours in pairs:
        # One that several lines read is rounded once for each piece, and under autocast once for all.
        if words.count(leaf) == 1 and yours is not None:
            assert bool(((mine == yours) | (mine.isnan() & yours.isnan())).all()), leaf


LEVELS = st.sampled_from(["O1", "auto", "O2", "O3"])


@pytest.mark.filterwarnings("ignore")
@settings(common, max_examples=3)
@given(broken_programs(), dtypes, LEVELS, st.booleans())
def test_no_exception_that_fp32_does_not_raise(program: Broken, dtype: torch.dtype, level: str, keep: bool) -> None:
    runs_where_fp32_does(program, dtype, level, keep)


@pytest.mark.filterwarnings("ignore")
@settings(common, max_examples=3)
@given(broken_programs(), dtypes)
def test_policy_torch_equals_autocast(program: Broken, dtype: torch.dtype) -> None:
    equals_autocast(program, dtype)


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
@settings(common, max_examples=120)
@given(broken_programs(), dtypes, LEVELS, st.booleans())
def test_no_exception_that_fp32_does_not_raise_more(
    program: Broken, dtype: torch.dtype, level: str, keep: bool
) -> None:
    runs_where_fp32_does(program, dtype, level, keep)


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
@settings(common, max_examples=120)
@given(broken_programs(), dtypes)
def test_policy_torch_equals_autocast_more(program: Broken, dtype: torch.dtype) -> None:
    equals_autocast(program, dtype)
