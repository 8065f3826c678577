"""Every public name has a docstring that tells its parameters and has an example that runs, and a place on the site."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import amp_compiler

ROOT = Path(__file__).parents[1]
NAMES = sorted(set(amp_compiler.__all__) - {"__version__"})
#: classes that users do not make themselves: a public function returns them
MADE_BY = {
    "AmpModule": "amp_compile",
    "Calibration": "calibrate",
    "ConvertedModel": "convert_model",
    "History": "fit",
    "Prediction": "predict",
    "Report": "report()",
    "Search": "search_policy",
    "TrainStep": "compile_train_step",
}


def parameters(value: Any) -> list[str]:
    """The names of what a function or a class takes."""
    try:
        given = inspect.signature(value).parameters.values()
    except ValueError:  # a builtin, such as a warning
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in given if p.kind not in variadic and p.name not in ("self", "cls")]


def own_docstring(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def methods(cls: type) -> dict[str, Any]:
    """Public methods and properties that our own classes define with a docstring, or should."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("amp_compiler"):
            found |= {name: member for name, member in vars(base).items() if not name.startswith("_")}
    kinds = (property, classmethod, staticmethod)
    return {name: m for name, m in found.items() if inspect.isfunction(m) or isinstance(m, kinds)}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_told(name: str) -> None:
    value = getattr(amp_compiler, name)
    text = own_docstring(value)
    if name in MADE_BY:
        assert MADE_BY[name] in text
        return
    if name != "AmpError" and isinstance(value, type) and issubclass(value, amp_compiler.AmpError):
        return  # all errors take what their base takes
    section = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", section, re.MULTILINE) == parameters(value)


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isclass(getattr(amp_compiler, name))])
def test_methods_are_documented(name: str) -> None:
    cls = getattr(amp_compiler, name)
    inherited = {"forward", "train", "state_dict", "load_state_dict"} if name == "AmpModule" else set()
    for method, member in methods(cls).items():
        if method in inherited or (name == "AmpModule" and hasattr(member, "__wrapped__")):
            continue  # as torch documents them
        text = inspect.getdoc(getattr(cls, method) if not isinstance(member, property) else member) or ""
        assert text, f"{name}.{method} has no docstring"
        taken = [] if isinstance(member, property) else parameters(getattr(cls, method))
        told = re.findall(r"``([^`]+)``|^    (\w+): ", text, re.MULTILINE)
        words = {word for code, item in told for word in re.findall(r"\w+", f"{code} {item}")}
        assert [p for p in taken if p not in words] == [], f"{name}.{method} does not tell its parameters"


@pytest.mark.parametrize("module", sorted({amp_compiler._PUBLIC[name] for name in NAMES}))
def test_examples_run(module: str) -> None:
    """Those of the public names of a module, and of their methods, each in a namespace of its own."""
    names = [name for name in NAMES if amp_compiler._PUBLIC[name] == module]
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name in names:
        value = getattr(amp_compiler, name)
        examples = [test for test in finder.find(value, name, module=inspect.getmodule(value)) if test.examples]
        assert any(test.name == name for test in examples), f"{name} has no example"
        for test in examples:
            told: list[str] = []
            failed = runner.run(test, out=told.append, clear_globs=False).failed  # Dynamo keeps names in the globals
            assert failed == 0, f"{test.name}: {''.join(told)}"


def test_every_name_has_one_place_in_the_reference() -> None:
    pages = {page: page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md"))}
    shown = [name for text in pages.values() for name in re.findall(r"^::: amp_compiler\.(\w+)$", text, re.MULTILINE)]
    assert sorted(shown) == NAMES
    overview = pages[ROOT / "docs/api/index.md"]
    errors = {name for name in NAMES if name.endswith("Error")} - {"AmpError"}
    assert [name for name in NAMES if name not in errors and f"`{name}`" not in overview] == []
