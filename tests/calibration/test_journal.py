"""The journal of a search: what was written comes back, and damage is told."""

from __future__ import annotations

import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_compiler import SearchError
from amp_compiler.calibration.journal import Journal, key_of

HEADER = {"model": "abc", "level": "O3"}


def test_values_come_back_in_order(tmp_path):
    path = tmp_path / "search.jsonl"
    journal = Journal(path, HEADER)
    journal.set_items([{"total": 3.0}])
    for value in (1.0, math.nan, math.inf, 0.1 + 0.2):
        journal.add("low", value, 0.5)
    again = Journal(path, HEADER)
    assert again.items == [{"total": 3.0}]
    assert again.recorded == 4
    values = [again.take("low") for _ in range(5)]
    assert str(values) == str([(1.0, 0.5), (math.nan, 0.5), (math.inf, 0.5), (0.1 + 0.2, 0.5), None])
    assert again.take("other") is None


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, HEADER)
    journal.keep("low", 1.0, 0.0)
    assert journal.take("low") == (1.0, 0.0)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_journal_that_was_cut_keeps_its_whole_lines(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.unlink(missing_ok=True)
    journal = Journal(path, HEADER)
    ends = [path.stat().st_size]
    for number in range(5):
        journal.add("low", float(number), 0.0)
        ends.append(path.stat().st_size)
    size = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, size)
    again = Journal(path, HEADER)
    assert again.recorded == sum(end <= size for end in ends[1:])
    again.add("low", 9.0, 0.0)
    assert Journal(path, HEADER).recorded == again.recorded, "what is added is read again"


@pytest.mark.parametrize("line", [
    b"{", b"[]", b'{"evaluated": "low"}', b'{"evaluated": 3, "value": 1}', b'{"value": true, "evaluated": "low"}',
    b"\xff",
])  # fmt: skip
def test_a_damaged_line_is_named_and_nothing_is_changed(tmp_path, line):
    path = tmp_path / "search.jsonl"
    journal = Journal(path, HEADER)
    journal.add("low", 1.0, 0.0)
    before = path.read_bytes() + line + b"\n" + b'{"evaluated": "low", "value": 2.0}\n'
    path.write_bytes(before)
    with pytest.raises(SearchError, match="Line 3 of the journal"):
        Journal(path, HEADER)
    assert path.read_bytes() == before


def test_a_journal_of_another_search(tmp_path):
    path = tmp_path / "search.jsonl"
    Journal(path, HEADER)
    with pytest.raises(SearchError, match=r"another search .with another level"):
        Journal(path, {**HEADER, "level": "O2"})
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"a": 1}) + "\n")
    missing = tmp_path / "no" / "file"
    for given_path, words in ((other, "not the journal"), (tmp_path, "folder"), (missing, "no folder")):
        with pytest.raises(SearchError, match=words):
            Journal(given_path, HEADER)
    assert json.loads(other.read_text()) == {"a": 1}


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "search.jsonl"
    journal = Journal(path, HEADER)
    journal.add("low", 1.0, 0.0)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SearchError, match=r"No space left.*continues"):
            journal.add("low", 2.0, 0.0)
    assert Journal(path, HEADER).recorded == 1


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_keys_differ_where_sets_do(a, b):
    assert (key_of(a, 61) == key_of(b, 61)) == (a == b)
