"""The examples in docstrings, the README and the pages of docs/ run; pages name all that they should; the package
list in pyproject.toml is whole."""

import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest

from amp_compiler.cli.app import app
from amp_compiler.common import errors
from amp_compiler.policy import LEVELS
from doc_pages import ROOT, pages, run_page

DOCS = ROOT / "docs"
#: the examples of public names are those of tests/test_api_docs.py
MODULES = [
    "amp_compiler",
    "amp_compiler.common.errors",
    "amp_compiler.common.messages",
    "amp_compiler.cost",
    "amp_compiler.cost.devices",
    "amp_compiler.cost.machine",
    "amp_compiler.policy.ops.names",
    "amp_compiler.policy.rules",
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


# ------------------------------------------------------------------------------------------------------- pages


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest's workers set a width
    monkeypatch.delenv("AMP_VERIFY", raising=False)  # as a reader runs it; other tests verify graphs
    monkeypatch.setenv("AMP_CPU_KERNELS", "python")  # on every machine the same, and nothing to compile
    failures = run_page(page)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ("```python\n>>> 1 + 1\n3\n```", "Expected:\n    3\nGot:\n    2"),
        ("```python\n# later.py\nx = 1\n```\n```python\n>>> from later import x; x\n2\n```", "Got:\n    1"),
        ("```python\n>>> print('a\\n\\nb')\na\n\nc\n```", "Got:\n    a\n    <BLANKLINE>\n    b"),
        ("```console\n$ amp-compiler --version\namp-compiler 9.9\n```", "printed:\namp-compiler 0"),
        ("```console\n$ rm model.pt2\n```", "is not amp-compiler"),
        ("```sh\nmake dmo\n```", "there is no target dmo"),
        ("```sh\namp-compiler dump model.py:make --sumary\n```", "--sumary"),
        ("```pyton\n1 + 1\n```", "a block of kind 'pyton'"),
    ],
)
def test_the_runner_sees_what_is_wrong(
    block: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{block}\n")
    (failure,) = run_page(page)
    assert told in failure
    assert "page.md" in failure


def test_an_exception_names_the_line_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(page)
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == (str(page), 5)


def test_the_readme_is_short_and_names_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 200
    assert [page.name for page in pages()[1:] if page.name != "index.md" and f"(docs/{page.name})" not in text] == []


def _first_column(page: str, heading: str) -> set[str]:
    """The names in backticks with which the rows of a section's table begin."""
    section = (DOCS / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return {found for found in re.findall(r"^\| `(\w+)`", section, re.MULTILINE)}


def test_all_environment_variables_are_listed() -> None:
    files = [file for room in ("amp_compiler", "passes", "kernels") for file in (ROOT / room).rglob("*.py")]
    read = {name for file in files for name in re.findall(r'"(AMP_[A-Z_]+)"', file.read_text())}
    assert _first_column("troubleshooting.md", "Environment variables") == read


def test_all_errors_are_listed() -> None:
    raised = {name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, errors.AmpError)}
    assert _first_column("troubleshooting.md", "Errors") == raised - {"AmpError"}


def test_all_levels_are_listed() -> None:
    assert _first_column("guide.md", "Levels") == set(LEVELS)
    readme = (ROOT / "README.md").read_text().partition("## Levels\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", readme, re.MULTILINE)) == set(LEVELS)


def test_all_commands_are_described() -> None:
    titles = re.findall(r"^## (\w+)$", (DOCS / "command-line.md").read_text(), re.MULTILINE)
    assert {command.name for command in app.registered_commands} <= set(titles)
