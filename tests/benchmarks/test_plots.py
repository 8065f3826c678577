"""Drawings can be read as XML, hold every name, and are the same for the same figures."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness import Ratio, bars, lines, panels

GROUPS = {
    "bert": {"autocast": Ratio(30.0, 28.0, 33.0), "O2": Ratio(0.9, 0.8, 1.1)},
    "lstm": {"O2": Ratio(1.0, 1.0, 1.0)},
    "none": {},
}
DRAWINGS = {
    "bars": lambda path: bars(path, "title", GROUPS, "label", log=True),
    "plain bars": lambda path: bars(path, "title", {"a": {"bytes": 3.0, "more": 4.0}}, "bytes"),
    "panels": lambda path: panels(path, "title", {"training": GROUPS, "inference": {"bert": GROUPS["lstm"]}}, "label"),
    "lines": lambda path: lines(path, "title", {"ours": ([2, 4, 8], [1.0, 2.0, 4.1])}, "layers", "seconds"),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_valid_and_the_same_twice(tmp_path: Path, name: str) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    DRAWINGS[name](first)
    DRAWINGS[name](second)
    assert ElementTree.parse(first).getroot().tag.endswith("svg")
    assert first.read_bytes() == second.read_bytes()
    assert "<!-- title -->" in first.read_text()  # text is drawn as outlines, with itself as a comment
