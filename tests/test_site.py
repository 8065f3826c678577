"""The documentation builds into a site without a warning, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import amp_compiler

ROOT = Path(__file__).parents[1]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "passes/README.md", "benchmarks/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").rglob("*.md"))]
_CODE = re.compile(r"^(`{3,}|~{3,}).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?P<path>[^()\s#]*)(?:#(?P<anchor>[^()\s]*))?\)")
_URL = re.compile(r"^[a-z]+:")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        found.add(re.sub(r"\s", "-", plain))
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead to no file or to no heading."""
    wrong = []
    for link in _LINK.finditer(_CODE.sub("", page.read_text())):
        if _URL.match(link["path"]):
            continue
        target = (page.parent / link["path"]).resolve() if link["path"] else page
        has_anchors = target.exists() and target.suffix == ".md"
        if not target.exists() or (link["anchor"] and has_anchors and link["anchor"] not in anchors(target)):
            wrong.append(link[0].removeprefix("]"))
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](other.md) [b](#here) [c](other.md#there-and-here)\n# Here", []),
        ("[a](none.md)", ["(none.md)"]),
        ("[a](#nowhere)", ["(#nowhere)"]),
        ("[a](other.md#nowhere) ![b](none.png)", ["(other.md#nowhere)", "(none.png)"]),
        ("[a](https://example.org/x#y) `[b](none.md)`\n```\n[c](none.md)\n```", []),
    ],
)
def test_broken_links_are_found(text: str, wrong: list[str], tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# There, `and` here")
    (tmp_path / "page.md").write_text(text)
    assert broken(tmp_path / "page.md") == wrong


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_the_site_builds_and_has_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    ran = build(ROOT / "mkdocs.yml", tmp_path)
    assert ran.returncode == 0, ran.stderr
    index = json.loads((tmp_path / "search/search_index.json").read_text())
    found = {entry["location"].partition("#")[2] for entry in index["docs"]}
    names = set(amp_compiler.__all__) - {"__version__"}
    assert {f"amp_compiler.{name}" for name in names} <= found
    assert "amp_compiler.DynamicLossScaler.step" in found  # inherited methods too
    text = (tmp_path / "api/compile.html").read_text()
    for parameter in ("white_list", "keep_output_dtypes"):
        assert f"<code>{parameter}</code>" in text
    assert "&gt;&gt;&gt;" in text
    first = (tmp_path / "index.html").read_text()
    assert "benchmarks.html" in first
    assert (tmp_path / "bench/growth.svg").exists()
    outside = set(re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', first))
    assert outside == set(), "the site loads nothing from elsewhere"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[a](other.md#nowhere)", "does not contain an anchor '#nowhere'"),
        ("[a](none.md)", "'none.md'"),
        ("::: amp_compiler.no_such_name", "amp_compiler.no_such_name"),
    ],
)
def test_the_build_is_strict(text: str, told: str, tmp_path: Path) -> None:
    """With the same settings, on a small site."""
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(text)
    (tmp_path / "docs/other.md").write_text("# Other")
    settings = f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nhooks: []\nnav: [index.md, other.md]\n"
    (tmp_path / "mkdocs.yml").write_text(settings)
    ran = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert ran.returncode == 1
    assert told in ran.stderr


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "source", "before", "after"),
    [
        ("index.md", "README.md", "[a](docs/benchmarks.md#x)", "[a](benchmarks.md#x)"),
        ("index.md", "README.md", "![a](docs/page.png)", "![a](page.png)"),
        ("index.md", "README.md", "[`a`](Makefile)", "`a`"),
        ("index.md", "README.md", "[a](no_such_file)", "[a](no_such_file)"),
        ("index.md", "README.md", "[a](https://example.org) [b](#c)", "[a](https://example.org) [b](#c)"),
        ("design.md", "docs/design.md", "[a](../CONTRIBUTING.md#layout)", "[a](contributing.md#layout)"),
        ("design.md", "docs/design.md", "[a](kernels.md)", "[a](kernels.md)"),
        ("api/index.md", "docs/api/index.md", "[a](../design.md)", "[a](../design.md)"),
        ("passes.md", "passes/README.md", "[a](../README.md)", "[a](index.md)"),
        ("index.md", "README.md", "```\n[a](Makefile)\n```", "```\n[a](Makefile)\n```"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(
    hook: ModuleType, page: str, source: str, before: str, after: str
) -> None:
    assert hook.rewrite(before, page, source) == after
