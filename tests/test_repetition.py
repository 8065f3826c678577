"""Product code does not repeat itself: no run of ten lines occurs in two places."""

from __future__ import annotations

import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("amp_compiler", "passes", "kernels")
SUFFIXES = (".py", ".cpp", ".h", ".js")
THEIRS = ("dagre.min.js",)  # another project's
LENGTH = 10

Line = tuple[str, int, str]  # file, number, what it says


def files() -> Iterator[Path]:
    for room in ROOMS:
        found = sorted((ROOT / room).rglob("*"))
        yield from (path for path in found if path.suffix in SUFFIXES and path.name not in THEIRS)


def lines_of(text: str, name: str) -> list[Line]:
    """The lines that say something: no blank ones, no comments, no imports; each run of spaces made one."""
    ignored = imports_of(text) if name.endswith(".py") else set()
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        said = re.sub(r"\s+", " ", line.strip())
        if said and number not in ignored and not said.startswith(("#", "//")):
            found.append((name, number, said))
    return found


def imports_of(text: str) -> set[int]:
    """The numbers of the lines of import statements."""
    found: set[int] = set()
    importing = False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.line.strip().startswith(("import ", "from ")):
            importing = True
        if importing:
            found.update(range(token.start[0], token.end[0] + 1))
        if token.type == tokenize.NEWLINE:
            importing = False
    return found


def repeated(texts: dict[str, str], length: int = LENGTH) -> list[str]:
    """``a.py:10 and b.py:20`` for each run of ``length`` lines that occurs in two places; one for each pair of runs,
    however long they are."""
    places: dict[tuple[str, ...], list[tuple[str, int, int]]] = defaultdict(list)
    for name, text in texts.items():
        lines = lines_of(text, name)
        for start in range(len(lines) - length + 1):
            run = tuple(said for _, _, said in lines[start : start + length])
            places[run].append((name, lines[start][1], start))
    found: dict[tuple[str, str, int], str] = {}
    for there in places.values():
        for other in there[1:]:
            key = there[0][0], other[0], other[2] - there[0][2]
            found.setdefault(key, f"{there[0][0]}:{there[0][1]} and {other[0]}:{other[1]}")
    return list(found.values())


def test_no_run_of_ten_lines_stands_in_two_places() -> None:
    assert repeated({str(path.relative_to(ROOT)): path.read_text() for path in files()}) == []


BODY = "".join(f"value_{i} = compute({i})\n" for i in range(LENGTH))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (BODY, 1),
        (BODY.replace(" = ", "   =  "), 1),
        (BODY.replace("value_5", "# why\n\nvalue_5"), 1),
        (BODY.replace("value_5", "another"), 0),
        ("", 0),
    ],
)
def test_the_search_finds_what_is_repeated(other: str, expected: int) -> None:
    assert len(repeated({"a.py": BODY, "b.py": f"import os\n{other}"})) == expected


def test_the_search_finds_a_run_twice_in_one_file_and_ignores_imports() -> None:
    assert repeated({"a.py": f"{BODY}\nend = 1\n{BODY}"}) == ["a.py:1 and a.py:13"]
    imports = "from torch import (\n" + "".join(f"    name_{i},\n" for i in range(LENGTH)) + ")\n"
    assert repeated({"a.py": imports, "b.py": imports}) == []
