"""The examples in docstrings run, and the package list in pyproject.toml is whole."""

import doctest
import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: the examples of public names are those of tests/test_api_docs.py
MODULES = [
    "amp_compiler",
    "amp_compiler.common.messages",
    "amp_compiler.policy.ops.names",
    "amp_compiler.cli.target",
    "amp_compiler.inspect.render.words",
    "amp_compiler.kernels.all_finite",
    "amp_compiler.kernels.unscale",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_package_is_listed_in_pyproject() -> None:
    """An editable install, which the tests use, would hide a forgotten line."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = set()
    for room in ("amp_compiler", "passes", "kernels"):
        for init in (ROOT / room).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join(parts if room == "amp_compiler" else ("amp_compiler", *parts)))
    assert found == set(listed)
