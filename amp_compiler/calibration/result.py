"""``Search``: what a search for a policy found, and how it is shown."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass

import torch

from ..common.errors import SearchError
from ..common.files import write_text
from ..inspect.render import pareto
from ..policy import Policy, dtype_name
from .items import OBJECTIVES, Item


@dataclass(frozen=True, slots=True)
class Trial:
    """One set of ops that was evaluated.

    Attributes:
        number: Its place in the search, from 0.
        fp32: The names of the ops that stayed in fp32 (``encoder.0:add#1``).
        share: The share of the work that was low, in the unit of the objective, from 0 to 1.
        values: The metric, once for each evaluation.
        holds: True if the metric is within the tolerance.
        seconds: How long its evaluations took.
        purpose: ``"search"`` or ``"verification"``.
    """

    number: int
    fp32: tuple[str, ...]
    share: float
    values: tuple[float, ...]
    holds: bool
    seconds: float = 0.0
    purpose: str = "search"

    @property
    def metric(self) -> float:
        """The mean of its values."""
        return sum(self.values) / len(self.values)


@dataclass(frozen=True, slots=True)
class Culprit:
    """One op that stays in fp32. ``alone`` is True if a trial shows that this op by itself breaks the tolerance."""

    name: str
    op: str
    module: str
    node: str
    source: str
    reason: str
    cost: float
    alone: bool

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.name}: {self.reason}{where}"


@dataclass(frozen=True)
class SearchReport:
    """Which ops stay in fp32 and why; it prints as a summary. Made by ``Search.report()``."""

    rows: tuple[Culprit, ...]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Search:
    """What ``search_policy`` found.

    Attributes:
        policy: The policy, for ``amp_compile``, ``compile_train_step`` and ``convert_model``.
        metric: The metric with this policy, from the evaluations that verified it.
        baseline: The metric of the fp32 model.
        trials: Every set of ops that was evaluated, in order.
        tolerance: As it was asked for.
        maximize: As it was asked for.
        items: The ops that were searched, from the least to the most dangerous.
        share: The share of the work that the policy runs in low precision, from 0 to 1.
        objective: What counts as work: ``"flops"``, ``"bytes"``, or the name of a device.
        complete: False if the budget was used up before the search came to its end.
        verified: False if no trial held: the policy is then fp32.
        confidence: With which confidence the metric is within the tolerance, for a metric that varies; else None.
        evaluations: How often ``evaluate`` was called, the fp32 model included.
        seconds: How long the evaluations took.
        blamed: The names of the ops that were shown to break the tolerance by themselves.
        level: The level that was searched.
        dtype: The low-precision dtype.
        reasons: Pairs of an op's name and why it stays in fp32.

    Examples:
        >>> import torch
        >>> from amp_compiler import search_policy
        >>> model, x = torch.nn.Linear(8, 8).eval(), torch.ones(2, 8)
        >>> search = search_policy(model, lambda net: -(net(x) - model(x)).abs().max(), tolerance=0.01)
        >>> search.policy.calls, search.share, search.evaluations
        ((), 1.0, 4)
    """

    policy: Policy
    metric: float
    baseline: float
    trials: tuple[Trial, ...]
    tolerance: float
    maximize: bool
    items: tuple[Item, ...]
    share: float
    objective: str
    complete: bool
    verified: bool
    confidence: float | None
    evaluations: int
    seconds: float
    blamed: tuple[str, ...]
    level: str
    dtype: torch.dtype
    reasons: tuple[tuple[str, str], ...] = ()

    @property
    def unit(self) -> str:
        """What ``share`` is a share of, in words."""
        known = self.objective in OBJECTIVES
        return self.objective if known else f"the time that low precision saves on {self.objective}"

    @property
    def front(self) -> tuple[Trial, ...]:
        """The trials that no other beats in both the share of low work and the metric, by increasing share."""
        sign = 1 if self.maximize else -1
        best: list[Trial] = []
        known = [t for t in self.trials if math.isfinite(t.metric)]
        for trial in sorted(known, key=lambda t: (-t.share, -sign * t.metric)):
            if not best or sign * trial.metric > sign * best[-1].metric:
                best.append(trial)
        return tuple(reversed(best))

    def report(self) -> SearchReport:
        """Return which ops stay in fp32, and so why the level as it is fails, as a value that prints as a summary."""
        items = {item.name: item for item in self.items}
        rows = [
            Culprit(name, items[name].op, items[name].module, items[name].node, items[name].source, reason,
                    items[name].cost, name in self.blamed)
            for name, reason in self.reasons
        ]  # fmt: skip
        rows.sort(key=lambda row: not row.alone)
        return SearchReport(tuple(rows), "\n".join(self._lines(rows)))

    def _lines(self, rows: list[Culprit]) -> list[str]:
        better = "at least" if self.maximize else "at most"
        bound = self.baseline + (-self.tolerance if self.maximize else self.tolerance)
        total = len(self.items)
        first = next((t for t in self.trials if not t.fp32), None)
        what = f"level {self.level}, {dtype_name(self.dtype)}"
        lines = [
            f"{what}: {total - len(self.reasons)} of {total} ops low, {self.share:.1%} of {self.unit}",
            f"metric {self.metric:.6g} (fp32 {self.baseline:.6g}, asked for {better} {bound:.6g})",
        ]
        if self.confidence is not None:
            lines[-1] += f", with {self.confidence:.0%} confidence"
        if first is not None:
            told = "holds" if first.holds else "fails"
            lines.append(f"everything low {told}: metric {first.metric:.6g}")
        if rows:
            lines.append("in fp32, and why:")
            lines += [f"  {row}" for row in rows[:40]]
            if len(rows) > 40:
                lines.append(f"  and {len(rows) - 40} more")
        end = "" if self.complete else "; the budget was used up before the search came to its end"
        lines.append(f"{self.evaluations} evaluations, {self.seconds:.1f} s{end}")
        return lines

    def __str__(self) -> str:
        return str(self.report())

    # ------------------------------------------------------------------------------------------------- files

    def to_toml(self) -> str:
        """Return the policy as TOML, with the reason for each op and the search's figures as a comment."""
        head = "\n".join(f"# {line}" for line in self._lines([])[:3])
        return f"{self.policy.to_toml()}\n# found by search_policy:\n{head}\n"

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_toml()`` to ``path``, which ``Policy.from_file`` reads."""
        write_text(path, self.to_toml(), what="The policy", error=SearchError)

    def to_json(self) -> str:
        """Return the result and every trial as JSON; a metric that is not finite is written as a text."""
        def number(value: float) -> float | str:
            return value if math.isfinite(value) else str(value)

        trials = [
            {"number": t.number, "share": t.share, "metric": number(t.metric), "values": [number(v) for v in t.values],
             "holds": t.holds, "purpose": t.purpose, "seconds": round(t.seconds, 3), "fp32": list(t.fp32)}
            for t in self.trials
        ]  # fmt: skip
        data = {
            "metric": self.metric, "baseline": self.baseline, "tolerance": self.tolerance, "maximize": self.maximize,
            "share": self.share, "objective": self.objective, "complete": self.complete, "verified": self.verified,
            "confidence": self.confidence, "evaluations": self.evaluations, "ops": len(self.items),
            "fp32": dict(self.reasons), "front": [t.number for t in self.front], "trials": trials,
        }  # fmt: skip
        return json.dumps(data, indent=1, allow_nan=False)

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a plot of all trials, share low against metric, with the Pareto front; also write it to ``path``."""
        bound = self.baseline + (-self.tolerance if self.maximize else self.tolerance)
        points = [pareto.Point(t.share, t.metric, t.holds, f"trial {t.number}: {len(t.fp32)} ops in fp32")
                  for t in self.trials]  # fmt: skip
        text = pareto.svg(points, [(t.share, t.metric) for t in self.front], self.baseline, bound, self.unit)
        if path is not None:
            write_text(path, text, what="The plot", error=SearchError)
        return text
