"""``passes/README.md`` lists the passes and facts that there are. To write the lists anew, run this file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from amp_compiler.cli.passes import names, purpose
from amp_compiler.passes import order
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.base import words

README = Path(__file__).parents[2] / "passes" / "README.md"


def passes_table() -> str:
    lines = ["| pass | takes | requires → ensures | needs | does |", "| --- | --- | --- | --- | --- |"]
    for step in order.ALL.values():
        needs = ", ".join(condition.needs for condition in step.when)
        flow = f"{names(step.requires)} → {names(step.ensures)}"
        lines.append(f"| `{step.name}` | {words(step.dialect)} | {flow} | {needs} | {purpose(step)} |")
    return "\n".join(lines)


def facts_list() -> str:
    return "\n".join(f"- **{fact.name}** ({words(fact.dialect)}): {fact.promise}" for fact in facts.ALL.values())


LISTS = {"passes": passes_table, "facts": facts_list}


def with_list(text: str, name: str) -> str:
    """The text with the list between its two comments made anew."""
    before, rest = text.split(f"<!-- {name} -->\n")
    _, after = rest.split(f"<!-- end of {name} -->")
    return f"{before}<!-- {name} -->\n{LISTS[name]()}\n<!-- end of {name} -->{after}"


@pytest.mark.parametrize("name", LISTS)
def test_the_list_is_up_to_date(name: str) -> None:
    text = README.read_text(encoding="utf-8")
    assert text == with_list(text, name), "run: .venv/bin/python tests/passes/test_readme.py"


@pytest.mark.parametrize("step", order.ALL.values(), ids=lambda s: s.name)
def test_the_docstring_of_a_pass_says_what_it_requires_and_ensures(step: Any) -> None:
    """The last lines of each pass's file name the facts; they are for people and must not go stale."""
    doc = " ".join((sys.modules[step.run.__module__].__doc__ or "").split())
    requires, _, ensures = doc.partition("Requires: ")[2].partition("Ensures: ")
    for fact in facts.ALL.values():
        assert (fact in step.requires) == (fact.name in words_of(requires)), fact.name
        said = ensures.partition(". ")[0]
        assert (fact in step.ensures) == (fact.name in words_of(said)), fact.name


def words_of(text: str) -> set[str]:
    """The facts that a sentence names come first, before a semicolon or a bracket."""
    head = text.partition(";")[0].partition("(")[0].partition(".")[0]
    return {word.strip() for word in head.removeprefix("and ").split(",")}


if __name__ == "__main__":
    written = README.read_text(encoding="utf-8")
    for each in LISTS:
        written = with_list(written, each)
    README.write_text(written, encoding="utf-8")
