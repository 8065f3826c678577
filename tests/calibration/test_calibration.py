"""The data of a calibration: merging, files, and what a damaged file gives."""

from __future__ import annotations

import errno
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from amp_compiler import Calibration, CalibrationError, amp_compile, calibrate
from amp_compiler.calibration.measured import measured_by_name
from amp_compiler.calibration.row import Row
from amp_compiler.ir.view import take_view
from amp_compiler.runtime.record import Range
from chromium import Chromium, find_chromium

COUNTS = st.integers(0, 2**40)
FLOATS = st.floats(0, 1e38, allow_nan=False)
EXPONENTS = st.dictionaries(st.integers(-127, 127), st.integers(1, 10**9)).map(lambda d: tuple(sorted(d.items())))
RANGES = st.builds(Range, COUNTS, FLOATS, FLOATS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, EXPONENTS)
ROWS = st.builds(
    Row, st.text(), st.text(), st.text(), st.text(), RANGES, FLOATS, st.none() | RANGES,
    st.lists(RANGES, max_size=3).map(tuple), st.none() | COUNTS, st.lists(RANGES, max_size=1).map(tuple), FLOATS,
)  # fmt: skip
CALIBRATIONS = st.builds(
    Calibration, st.lists(ROWS, max_size=3).map(tuple), st.sampled_from([torch.float16, torch.bfloat16]),
    FLOATS, COUNTS, st.text(), st.booleans(),
)  # fmt: skip
ONE = Calibration(
    (Row("linear", "linear", "fc", "net.py:3", Range(4, 7e4, 1e-3, 1, 0, 0, 0, 2, ((-10, 1), (16, 3))), 0.5,
         Range(4, 1e-9, 1e-9, 0, 4, 0, 0, 1, ((-30, 4),)), (Range(2, 1.0, 1.0),)),),
    torch.float16, 1.0, 2, "Net", True,
)  # fmt: skip


@settings(max_examples=40)
@given(CALIBRATIONS)
def test_json_gives_back_every_field(calibration: Calibration) -> None:
    assert Calibration.from_json(calibration.to_json()) == calibration


def test_a_file_of_a_release_without_cancellations_is_read() -> None:
    text = ONE.to_json().replace('"cancellation": 0.0', '"other": 0.0')
    assert '"other"' in text
    assert Calibration.from_json(text) == ONE


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    ONE.save(tmp_path / "ranges.json")
    assert Calibration.load(tmp_path / "ranges.json") == ONE


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, share: float) -> None:
    text = ONE.to_json()
    path = tmp_path / "ranges.json"
    path.write_text(text[: int(len(text) * share)])
    with pytest.raises(CalibrationError, match=r"ranges\.json is"):
        Calibration.load(path)


DAMAGE: dict[str, tuple[Any, ...]] = {
    "no kind": ("kind", "policy"),
    "newer": ("version", 99),
    "a dtype": ("dtype", "float64"),
    "a negative count": ("batches", -1),
    "a scale that is a text": ("scale", "1"),
    "a bool as a number": ("batches", True),
    "rows that are missing": ("number_of_rows", 2),
    "rows that are none": ("rows", 3),
    "a row that is none": ("rows", [3]),
    "infinite": ("scale", float("inf")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str) -> None:
    key, value = DAMAGE[name]
    data = json.loads(ONE.to_json())
    data[key] = value
    with pytest.raises(CalibrationError, match="calibrat"):
        Calibration.from_json(json.dumps(data))


@pytest.mark.parametrize("key", ["node", "result", "sensitivity", "operands", "gradient"])
def test_a_row_without_a_field_is_damage(key: str) -> None:
    data = json.loads(ONE.to_json())
    del data["rows"][0][key]
    with pytest.raises(CalibrationError, match=f"damaged .*{key} is missing"):
        Calibration.from_json(json.dumps(data))


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ranges.json"
    ONE.save(path)
    before = path.read_bytes()

    def full(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CalibrationError, match=r"could not be written .*No space left on device"):
        Calibration().save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_merged_over_batches() -> None:
    other = Calibration(
        (Row("linear_3", "linear", "fc", "net.py:3", Range(4, 9e4, 1e-2, 2, 0, 0, 0, 5, ((16, 4),)), 2.0),
         Row("relu", "relu", "", "net.py:4", Range(4, 1.0, 1.0), 1.0)),
        torch.float16, 1.0, 6, "Net", True,
    )  # fmt: skip
    first, second = ONE.merged(other).rows
    assert (first.node, first.max_abs, first.min_nonzero, first.result.batch) == ("linear", 9e4, 1e-3, 5)
    assert first.overflow == 3 / 8
    assert first.underflow == 1.0  # of the gradients
    assert first.sensitivity == 0.25 * 0.5 + 0.75 * 2.0
    assert first.result.exponents == ((-10, 1), (16, 7))
    assert second == other.rows[1]
    assert ONE.merged(other).batches == 8


@pytest.mark.parametrize("other", [Calibration(model="Other", has_gradients=True), Calibration(model="Net")])
def test_calibrations_of_different_models_are_not_merged(other: Calibration) -> None:
    with pytest.raises(CalibrationError, match="do not belong together"):
        ONE.merged(other)


class _Tags(HTMLParser):
    """Counts the elements of a page and checks that they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@given(CALIBRATIONS)
def test_the_page_has_every_op(calibration: Calibration) -> None:
    tags = _Tags()
    tags.feed(calibration.to_html())
    assert tags.open == []
    assert [tag for tag, _ in tags.seen].count("details") == len(calibration.rows)


def test_the_page_colours_by_range_and_shows_exponents(tmp_path: Path) -> None:
    text = ONE.to_html(tmp_path / "ranges.html")
    assert (tmp_path / "ranges.html").read_text() == text
    tags = _Tags()
    tags.feed(text)
    assert [given["class"] for tag, given in tags.seen if tag == "summary"] == ["overflows"]
    bars = [given["fill"] for tag, given in tags.seen if tag == "rect"]
    assert bars == ["#4a7", "#d43", "#d43"]  # 2**-10 fits; 2**16 and the gradients at 2**-30 do not


@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium on PATH")
def test_a_click_shows_the_exponents(tmp_path: Path) -> None:
    ONE.to_html(tmp_path / "ranges.html")
    with Chromium() as browser:
        browser.open(tmp_path / "ranges.html")
        seen = "[...document.querySelectorAll('svg')].filter(e => e.checkVisibility()).length"
        assert browser.run(seen) == 0
        browser.click("summary")
        assert browser.run(seen) == 2, "results and gradients"
        colour = "getComputedStyle(document.querySelector('{}')).backgroundColor"
        assert browser.run(colour.format("summary")) == "rgb(249, 201, 196)", "red: it overflows"
        assert browser.run(colour.format("summary span:last-child")).startswith("rgba(60, 90, 200"), "by sensitivity"
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith("file:")] == []


def test_the_calls_of_a_further_graph_have_numbers_of_their_own() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 10.0
            torch._dynamo.graph_break()
            return torch.tanh(y) * 1000.0

    model, x = Broken(), torch.ones(4)
    found = calibrate(model, [(x, None)])
    compiled = amp_compile(model, dtype=torch.float16)
    compiled(x)
    told = [measured_by_name(found, take_view(graph), "here")["mul"][0] for graph in compiled.graphs]
    assert "between 10 and 10" in told[0]
    assert "between 1e+03 and 1e+03" in told[1]
