"""Run passes in a checked order: verify the graph after each, and record what each did to it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import fx

from ..common.errors import AmpError, PipelineError
from .base import Context, Dialect, Fact, Pass, words
from .records import Record, record
from .verify import deep_by_default, verify


@dataclass(frozen=True)
class Pipeline:
    """Passes in an order that is checked when the pipeline is built.

    ``given``: the facts that hold on the graphs before the first pass. ``switched_off``: names of passes that the user
    has switched off. A pass whose conditions (``Pass.when``) are not met is left out, and so is one that requires a
    fact that a missing pass would have ensured; its record says why. A pass that nobody asked for has no record.
    """

    passes: tuple[Pass, ...]
    given: tuple[Fact, ...]
    switched_off: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        dialect = self._dialect()
        facts = set(self.given)
        ran: list[str] = []
        for step in self.passes:
            missing = [fact for fact in step.requires if fact not in facts]
            if missing:
                maker = missing[0].made_by
                where = f"; '{maker}' ensures it and must come earlier" if maker else ""
                raise PipelineError(
                    f"Pass '{step.name}' needs '{missing[0].name}', which nothing before it ensures{where}. "
                    f"These run before it: {', '.join(ran) or 'none'}.",
                    pass_name=step.name,
                )
            for wanted in (step.dialect, *(fact.dialect for fact in (*step.requires, *step.ensures))):
                dialect = dialect or wanted
                if wanted not in (None, dialect):
                    ours = f"the graphs of this pipeline are {words(dialect)}"
                    told = f"Pass '{step.name}' is for {words(wanted)}, but {ours}."
                    raise PipelineError(told, pass_name=step.name)
            facts.update(step.ensures)
            ran.append(step.name)

    def _dialect(self) -> Dialect | None:
        """Return the dialect of the graphs on which all the given facts hold."""
        found = sorted({fact.dialect.value for fact in self.given if fact.dialect is not None})
        if len(found) > 1:
            raise PipelineError(f"No graph has all these facts, some are of {' and some of '.join(found)}: "
                                f"{', '.join(fact.name for fact in self.given)}.")  # fmt: skip
        return Dialect(found[0]) if found else None

    def run(
        self, gm: fx.GraphModule, ctx: Context, history: list[Record], *, graph: str, after: str = "capture",
        known: frozenset[Fact] | None = None,
    ) -> frozenset[Fact]:  # fmt: skip
        """Run the passes on ``gm`` in place, verify before the first and after each, and write one record per pass.

        Returns the facts that hold afterwards. ``after``: the stage that made the graph. ``known``: what an earlier
        pipeline returned for it; a given fact that is not among them does not hold, because a pass was left out there.
        """
        facts = {fact for fact in self.given if known is None or fact in known}
        deep = ctx.deep or deep_by_default()
        verify(gm, facts, ctx, after, deep=deep)
        ran: list[str] = []
        begun = len(history)
        for step in (p for p in self.passes if p.is_asked(ctx)):
            note = self._why_not(step, ctx, facts)
            if note:
                history.append(record(step.name, 0.0, False, gm, graph, history, note, fresh=len(history) == begun))
                continue
            start = time.perf_counter()
            try:
                modified = step.run(gm, ctx)
            except AmpError as error:
                error.pass_name = error.pass_name or step.name
                raise
            except Exception as error:
                raise PipelineError(
                    f"Pass '{step.name}' failed on a {graph} graph after {', '.join(ran) or after}: "
                    f"{type(error).__name__}: {error}.",
                    pass_name=step.name,
                    hint=f"Switch it off with disable_passes=['{step.name}'] and report it.",
                ) from error
            verify(gm, step.ensures, ctx, step.name, deep=deep, rerun=modified)
            facts.update(step.ensures)
            ran.append(step.name)
            seconds, fresh = time.perf_counter() - start, modified or len(history) == begun
            history.append(record(step.name, seconds, modified, gm, graph, history, fresh=fresh))
        return frozenset(facts)

    def _why_not(self, step: Pass, ctx: Context, facts: set[Fact]) -> str:
        """Return why a pass does not run, for its record; "" if it does."""
        if step.name in self.switched_off:
            return "switched off"
        if unmet := step.unmet(ctx):
            return f"left out: needs {unmet}"
        missing = next((fact.name for fact in step.requires if fact not in facts), "")
        return f"left out: needs '{missing}'" if missing else ""
