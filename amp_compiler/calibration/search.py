"""The search for a policy: trials, their order, and what is known about each op at the end.

``run_search`` gets the compiler as a function, because this room is below ``amp_compile``; ``search_policy`` in
``amp_compiler/search.py`` is what users call.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..common.errors import AmpError, AmpWarning, ArgumentError, SearchError
from ..common.messages import raised_at, traced_line, users_frame
from ..cost.devices import find
from ..policy import Policy, check_level, check_low_dtype, dtype_name
from .bisect import Exhausted, Found, find_largest
from .calibration import Calibration
from .guard import Guard
from .items import OBJECTIVES, Item, Objective, Work, by_module, find_work, order, policy_for, with_calibration
from .journal import Journal, key_of
from .judge import CONFIDENCE, Judge
from .result import Search, Trial

BASELINE = "baseline"
#: how often one trial of a noisy metric is evaluated at most
REPEATS = 5


Compile = Callable[[Policy], Any]
Evaluate = Callable[[Any], float]


def run_search(
    model: Any, compile_with: Compile, evaluate: Evaluate, *, tolerance: float, maximize: bool,
    dtype: torch.dtype | str, level: str, calibration: Calibration | None, objective: Objective, budget: int,
    journal: str | os.PathLike[str] | None,
) -> Search:  # fmt: skip
    """Search for the policy with the most work in low precision; the arguments are those of ``search_policy``."""
    low = _check(evaluate, tolerance, maximize, dtype, level, calibration, objective, budget)
    header = {"model": _fingerprint(model), "level": level, "dtype": dtype_name(low), "objective": _name(objective)}
    trials = _Trials(Policy(level, low), compile_with, evaluate, Guard(model), Journal(journal, header), budget)
    judge = _baseline(trials, tolerance, maximize)
    work = _work(trials, objective, low)
    if calibration is not None:
        work = with_calibration(work, calibration, low)
    return _Searching(trials, judge, work, calibration is not None, _name(objective)).run()


def _check(
    evaluate: Any, tolerance: Any, maximize: Any, dtype: Any, level: str, calibration: Any, objective: Any, budget: Any
) -> torch.dtype:
    if not callable(evaluate):
        raise ArgumentError(f"evaluate must be a function that takes the compiled model, not {evaluate!r}.")
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
        raise ArgumentError(f"tolerance must be a number of at least 0, in the unit of the metric, not {tolerance!r}.")
    if type(maximize) is not bool:
        raise ArgumentError(f"maximize must be True or False, not {maximize!r}.")
    if type(budget) is not int or budget < 4:
        raise ArgumentError(f"budget is a number of evaluations and must be at least 4, not {budget!r}.")
    if objective not in OBJECTIVES:
        try:
            find(objective)
        except ArgumentError as error:
            raise ArgumentError(
                f"Unknown objective {objective!r}: choose one of {', '.join(OBJECTIVES)}, or a device. {error}"
            ) from None
    if calibration is not None and not isinstance(calibration, Calibration):
        raise ArgumentError(f"calibration must be what calibrate returns, not {type(calibration).__name__}.")
    if not Policy(check_level(level)).rewrites:
        raise ArgumentError(f"level {level!r} runs nothing in low precision: there is nothing to search.")
    return check_low_dtype(dtype)


def _name(objective: Objective) -> str:
    return objective if objective in OBJECTIVES else find(objective).name


def _fingerprint(model: Any) -> str:
    """Return a text that differs for models with other weights or other names of weights."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
    for name, tensor in model.state_dict().items() if isinstance(model, nn.Module) else ():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class _Trials:
    """Evaluates policies, within a budget, and writes every evaluation down."""

    def __init__(
        self, base: Policy, compile_with: Compile, evaluate: Evaluate, guard: Guard, journal: Journal, budget: int
    ) -> None:
        self.base, self.compile_with, self.evaluate = base, compile_with, evaluate
        self.guard, self.journal, self.budget = guard, journal, budget
        self.spent, self.seconds = 0, 0.0
        self.compiled: tuple[str, Any] | None = None  # the last model, for repeats
        self.warned = False

    def value(self, key: str, policy: Policy, reserve: int = 0) -> float:
        """Return one value of the metric under ``policy``, which the journal knows as ``key``. Raises ``Exhausted`` if
        no more than ``reserve`` evaluations are left."""
        if self.spent + reserve >= self.budget:
            raise Exhausted
        self.spent += 1
        found = self.journal.take(key)
        if found is not None:
            self.seconds += found[1]
            return found[0]
        start = time.perf_counter()
        value = self.run(key, policy)
        self.seconds += time.perf_counter() - start
        self.journal.add(key, value, time.perf_counter() - start)
        return value

    def run(self, key: str, policy: Policy) -> float:
        """Compile the model, unless it is the last one again, and evaluate it."""
        if self.compiled is None or self.compiled[0] != key:
            self.compiled = None  # the one before is freed first
            self.compiled = key, self.compile_with(policy)
        what = "the fp32 model" if key == BASELINE else f"evaluation {max(self.spent, 3)}"
        try:
            value = _number(self.evaluate(self.compiled[1]), what)
        except AmpError:
            raise
        except Exception as error:
            kept = f" {self.journal.recorded} evaluations are in {self.journal.path}: start the search again with it " \
                   "to continue." if self.journal.path is not None else ""  # fmt: skip
            raise SearchError(
                f"evaluate raised an exception on {what}: {traced_line(error)}{raised_at(error)}. Correct "
                f"it, or return float('nan') for a model that does not work.{kept}"
            ) from error
        finally:
            changed = self.guard.restore()
            if changed and not self.warned:
                self.warned = True
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                warnings.warn(
                    f"evaluate changed {changed[0]}{more} of the model. The search restores them after each "
                    "evaluation, so that all trials start alike; use model.eval() or a copy if this was not intended.",
                    AmpWarning, stacklevel=users_frame(),
                )  # fmt: skip
        return value


def _number(value: Any, what: str) -> float:
    try:
        if value is None or isinstance(value, (str, bytes)):
            raise TypeError
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise SearchError(
            f"evaluate must return the metric as a number, but returned {type(value).__name__} on {what}."
        ) from None


def _baseline(trials: _Trials, tolerance: float, maximize: bool) -> Judge:
    """Evaluate the fp32 model twice, and more often if the two values differ."""
    policy = Policy("O0", trials.base.low)
    values = [trials.value(BASELINE, policy)]
    if not math.isfinite(values[0]):
        raise SearchError(
            f"evaluate gives {values[0]} for the fp32 model, so nothing can be compared with it. Bound the metric, "
            "such as min(snr, 100.0), or return the error itself with maximize=False."
        )
    values.append(trials.value(BASELINE, policy))
    while len(set(values)) > 1 and len(values) < min(REPEATS, trials.budget - 2):
        values.append(trials.value(BASELINE, policy))
    judge = Judge(values, tolerance, maximize)
    if judge.is_noisy and not all(map(math.isfinite, values)):
        raise SearchError("evaluate gives NaN or an infinity for the fp32 model in some of its runs: correct it.")
    if judge.is_noisy and judge.uncertainty(REPEATS) > tolerance:
        raise SearchError(
            f"The metric of the fp32 model varies from run to run, from {min(values):.6g} to {max(values):.6g}. With a "
            f"tolerance of {tolerance:g}, {REPEATS} runs cannot tell a good model from a bad one: fix the seeds in "
            f"evaluate, evaluate on more data, or use a tolerance of at least {judge.uncertainty(REPEATS):.2g}."
        )
    return judge


def _work(trials: _Trials, objective: Objective, low: torch.dtype) -> Work:
    """Return the ops of the model; they are known when everything was low once, or from the journal."""
    known = trials.journal.items
    if known is not None:
        try:
            items = tuple(Item(**fields) for fields in known[1:])
            return Work(items, float(known[0]["total"]))
        except (TypeError, KeyError, ValueError, IndexError):
            raise SearchError(
                f"The ops in the journal {trials.journal.path} cannot be read: remove the file to start anew."
            ) from None
    key, start = key_of((), 0), time.perf_counter()
    value = trials.run(key, trials.base)
    assert trials.compiled is not None
    graphs = trials.compiled[1].graphs
    if not graphs:
        raise SearchError(
            "evaluate did not run the model that it was given: no graph was captured. It must call its argument, not "
            "the original model."
        )
    work = find_work(graphs, objective, low)
    if not work.items:
        raise SearchError(
            f"Level {trials.base.level} runs no op of this model in {dtype_name(low)}, so there is nothing to search. "
            "Pass the fp32 model; its report (amp_compile(model, level).report()) says why each op has its precision."
        )
    trials.journal.set_items([{"total": work.total}, *(item.to_dict() for item in work.items)])
    trials.journal.keep(key, value, time.perf_counter() - start)
    return work


class _Searching:
    """One search: asks for sets of items, and explains the result."""

    def __init__(self, trials: _Trials, judge: Judge, work: Work, ordered: bool, objective: str) -> None:
        self.trials, self.judge, self.work, self.objective = trials, judge, work, objective
        self.ordered = order(work)
        self.is_calibrated = ordered
        self.made: list[Trial] = []
        self.reserve = REPEATS if judge.is_noisy else 1

    def run(self) -> Search:
        groups = [] if self.is_calibrated else by_module(self.work, self.ordered)
        suspects = sum(item.suspect for item in self.work.items)
        found = find_largest(self.ordered, self.holds, suspects=suspects, groups=groups)
        final = self.verified()
        if self.judge.maximize and self.judge.mean == 0 and any(t.metric > 0 for t in self.made):
            warnings.warn(
                "search_policy: the metric is 0 in fp32 and larger in low precision, as an error is, but larger values "
                "count as better here: pass maximize=False (--minimize) if it is an error.",
                AmpWarning, stacklevel=users_frame(),
            )  # fmt: skip
        if final is None or not found.complete:
            self.warn(final)
        return self.result(found, final)

    def holds(self, low: frozenset[int]) -> bool:
        """Evaluate the model with these items low, as often as the noise asks for."""
        return self.trial(low, self.reserve, REPEATS if self.judge.is_noisy else 1, "search").holds

    def trial(self, low: frozenset[int], reserve: int, most: int, purpose: str, *, all_of_them: bool = False) -> Trial:
        items = self.work.items
        fp32 = [items[i] for i in self.ordered if i not in low]
        key = key_of([i for i in range(len(items)) if i not in low], len(items))
        policy = policy_for(self.trials.base, fp32)
        values: list[float] = []
        before = self.trials.seconds
        while len(values) < most:
            values.append(self.trials.value(key, policy, reserve))
            if not all_of_them and self.judge.is_decided(values):
                break
        if len(values) > 1:
            self.judge.groups.append(values)
        made = Trial(
            len(self.made), tuple(item.name for item in fp32), self.work.share(items[i] for i in low), tuple(values),
            self.judge.holds(values), self.trials.seconds - before, purpose,
        )  # fmt: skip
        self.made.append(made)
        return made

    def verified(self) -> Trial | None:
        """Evaluate the best trial once more, by itself; if it does not hold then, the next best."""
        number = {item.name: i for i, item in enumerate(self.work.items)}
        candidates = sorted((t for t in self.made if t.holds), key=lambda t: (t.share, -len(t.fp32)), reverse=True)
        most = REPEATS if self.judge.is_noisy else 1
        for candidate in candidates:
            low = frozenset(range(len(self.work.items))) - {number[name] for name in candidate.fp32}
            self.trials.compiled = None  # compiled anew too
            try:
                again = self.trial(low, 0, most, "verification", all_of_them=True)
            except Exhausted:
                return None
            if again.holds:
                return again
        return None

    def warn(self, final: Trial | None) -> None:
        if final is None and any(t.holds for t in self.made):
            text = "no trial that held did so again when it was verified, so the policy leaves everything in fp32"
        elif final is None:
            text = "no trial with any op in low precision holds, so the policy leaves everything in fp32"
        else:
            text = "the result holds, but more of the model may be able to run in low precision"
        if self.trials.spent + self.reserve >= self.trials.budget:
            text = f"the budget of {self.trials.budget} evaluations is used up: {text}; raise budget to search on"
        warnings.warn(f"search_policy: {text}.", AmpWarning, stacklevel=users_frame())

    def result(self, found: Found[int], final: Trial | None) -> Search:
        out = [item for item in self.work.items if final is None or item.name in final.fp32]
        reasons = {item: self.reason(item) for item in out}
        base = self.trials.base
        return Search(
            policy=policy_for(base, out, reasons) if final is not None else Policy("O0", base.low),
            baseline=self.judge.mean, metric=final.metric if final is not None else self.judge.mean,
            tolerance=self.judge.tolerance, maximize=self.judge.maximize, trials=tuple(self.made),
            items=tuple(self.work.items[i] for i in self.ordered), share=final.share if final is not None else 0.0,
            objective=self.objective, complete=found.complete, verified=final is not None,
            confidence=CONFIDENCE if self.judge.is_noisy else None, evaluations=self.trials.spent,
            seconds=self.trials.seconds, blamed=tuple(i.name for i in out if self.alone(i) is not None),
            level=base.level, dtype=base.low, reasons=tuple((item.name, text) for item, text in reasons.items()),
        )  # fmt: skip

    def alone(self, item: Item) -> Trial | None:
        """Return a failed trial that differs from one that held in this op alone: the op is why."""
        held = {frozenset(t.fp32) for t in self.made if t.holds}
        return next((t for t in self.made if not t.holds and item.name not in t.fp32
                     and frozenset({*t.fp32, item.name}) in held), None)  # fmt: skip

    def reason(self, item: Item) -> str:
        trial = self.alone(item)
        parts = [item.range] if item.range else []
        if trial is not None:
            worse = f"{trial.metric:.6g}, fp32 {self.judge.mean:.6g}"
            parts.append(f"in {dtype_name(self.trials.base.low)} the metric is {worse} (trial {trial.number})")
        else:
            parts.append("not tried alone")
        return "; ".join(parts)
