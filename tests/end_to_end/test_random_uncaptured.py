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
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from end_to_end.test_random_programs import LEAVES, Program, Result, common, dtypes, leaves, programs, run
from hypothesis import example, given, settings
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
    pairs: Sequence[tuple[str, Any, Any]] = list(zip(program.inputs, ours[1], theirs[1], strict=True))
    for leaf, mine, yours in pairs:
        if yours is not None and determined(program, leaf):
            assert bool(((mine == yours) | (mine.isnan() & yours.isnan())).all()), leaf


def determined(program: Broken, leaf: str) -> bool:
    """True if the bits of a leaf's gradient do not depend on where the pieces of a program begin and end.

    A leaf that is read several times is rounded once for each piece, and under autocast once for all. A value that is
    read three times has three gradients, and those of one piece are added first: ``torch.compile`` in fp32 changes bits
    in the same way.
    """
    same_as = identities(program)
    reads: Counter[str] = Counter()
    reached = {leaf}  # the values that depend on the leaf
    for line in program.lines:
        name, expression = line.split(" = ", 1)
        if name in same_as:
            continue
        read = [same_as.get(word, word) for word in re.findall(r"\w+", expression)]
        reads.update(read)
        if reached.intersection(read):
            reached.add(name)
    returned = (text.removesuffix(".clone()") for text in program.returns)
    reads.update(same_as.get(name, name) for name in returned)
    return reads[leaf] <= 1 and all(reads[name] <= 2 for name in reached)


def identities(program: Broken) -> dict[str, str]:
    """Name -> the name of the value that it is: ``x.float()`` of an fp32 tensor is ``x`` itself."""
    scope: dict[str, Any] = {"torch": torch, "F": F, **dict(zip(LEAVES, leaves(program.seed), strict=True))}
    first = {id(scope[leaf]): leaf for leaf in LEAVES}
    found: dict[str, str] = {}
    for line in program.lines:
        exec(line, scope)
        name = line.split(" = ", 1)[0]
        origin = first.setdefault(id(scope[name]), name)
        if origin != name:
            found[name] = origin
    return found


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


#: ``v0`` is ``x``, and three of the lines that read it have a gradient
ALIAS = Broken(
    ("v0 = x.float()", "v1 = v0 + v0.mean()", "v2 = v0.detach().prod(-1)", "v3 = v0.double()", "v4 = v0.clone()"),
    ("v1.clone()", "v2.clone()", "v3.clone()", "v4.clone()"),
    0,
    ("skipped frame", "as it is", "as it is", "foreign call", "as it is"),
)


def test_whose_gradients_are_compared() -> None:
    assert identities(ALIAS) == {"v0": "x"}
    assert not determined(ALIAS, "x")
    lines = ("v0 = x * tiny", "v1 = v0 + v0", "v2 = v0.exp()")
    styles = ("as it is", "as it is", "graph break")
    twice = Broken(lines[:2], ("v1.clone()",), 0, styles[:2])
    three_times = Broken(lines, ("v1.clone()", "v2.clone()"), 0, styles)
    for leaf in ("x", "tiny"):
        assert determined(twice, leaf)
        assert not determined(three_times, leaf)


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
@settings(common, max_examples=120)
@example(ALIAS, torch.float16)
@given(broken_programs(), dtypes)
def test_policy_torch_equals_autocast_more(program: Broken, dtype: torch.dtype) -> None:
    equals_autocast(program, dtype)
